// What both prefill kernels share: the tiles the host makes, their arguments, masks and the online softmax of a
// warp's 16 rows. Knows nothing of how K and V come in.
#pragma once
#include "fragments.cuh"
#include <cuda.h>

namespace pagemill {

constexpr float RESCALE_SLACK = 8.0f; // in powers of two, as in attention_decode.cu

/// A tile of query rows of one sequence; made by the host.
struct PrefillTile {
    uint32_t q_row;       // row of the sequence's first new token in q and out
    uint32_t q_len;       // new tokens of the sequence
    uint32_t kv_len;      // tokens in the cache, the new ones included
    uint32_t table_start; // where the sequence's table starts in block_table
    uint32_t first;       // the tile's first row: a multiple of the tile's rows, below q_len * G
};

struct PrefillParams {
    CUtensorMap kv_map;          // pool tensor as [num_blocks * 2 * K * B, E], box [min(B, 128), 64], 128-byte swizzle
    const void* q;               // [T, q_stride] elements of q_type; head h at h * E
    void* out;                   // [T, out_stride] elements of out_type
    const void* kv;              // pool tensor
    const uint32_t* block_table; // all sequences, end to end
    const PrefillTile* tiles;    // costliest first
    const uint32_t* work;        // tile * K + KV head, thread block after thread block; null: thread block b does b
    const uint32_t* work_start;  // [gridDim.x + 1] where each thread block's work starts
    const float* sinks;          // [H] or null
    float scale;                 // multiplies q·k
    float soft_cap;              // 0: none
    uint32_t window;             // 0: none; else position p sees (p - window, p]
    uint32_t num_heads;
    uint32_t num_kv_heads;
    uint32_t block_size_log2;
    uint32_t q_stride;
    uint32_t out_stride;
    uint32_t q_type;             // ActivationType
    uint32_t out_type;           // ActivationType
};
static_assert(sizeof(PrefillTile) == 20 && sizeof(PrefillParams) == 256, "src/kernels/attention_prefill.rs has the same structs");

/// What a thread block works on: its tile, and the key steps [step_begin, step_end) it walks downwards.
template <int ROWS, int KEYS> struct PrefillWork {
    PrefillTile tile;
    int kv_head, group;
    int step_begin, step_end;
    int first_visible; // smallest position any row sees
    /// `index`: tile * K + KV head.
    __device__ __forceinline__ PrefillWork(const PrefillParams& p, uint32_t index) {
        tile = p.tiles[index / p.num_kv_heads];
        kv_head = index % p.num_kv_heads, group = p.num_heads / p.num_kv_heads;
        const int offset = tile.kv_len - tile.q_len, first = tile.first / group;
        const int last = min((tile.first + ROWS - 1) / group, tile.q_len - 1);
        first_visible = p.window != 0 ? max(0, offset + first + 1 - int(p.window)) : 0;
        step_begin = first_visible / KEYS;
        step_end = (offset + last) / KEYS + 1;
    }
    /// Position of row `r` of the tile in its sequence; at least kv_len for rows behind the last token.
    __device__ __forceinline__ int position(int r) const { return tile.kv_len - tile.q_len + (tile.first + r) / group; }
};

/// Asks for 8 elements of q from `at` on (an address, also where they are not `wanted`: zeros). Elements of 16 bits come as
/// they are, without a register, and `turn_q` makes them the cache's; those of f32 are fetched at once.
template <class T> __device__ __forceinline__ void ask_for_q(unsigned char* place, const PrefillParams& p, size_t at, bool wanted) {
    if (p.q_type != ACT_F32) return copy16_async(shared_address(place), static_cast<const uint16_t*>(p.q) + at, wanted);
    *reinterpret_cast<uint4*>(place) = wanted ? eight_f32_as<T>(static_cast<const float*>(p.q) + at) : make_uint4(0, 0, 0, 0);
}

/// What the same thread has asked for, once it has come, in the cache's type.
template <class T> __device__ __forceinline__ void turn_q(unsigned char* place, uint32_t q_type) {
    if (q_type == ACT_F32 || q_type == (T::IS_BF16 ? ACT_BF16 : ACT_F16)) return;
    *reinterpret_cast<uint4*>(place) = eight_as<T>(*reinterpret_cast<uint4*>(place), q_type);
}

/// Running softmax of a thread's two rows (g and g + 8 of its warp's 16).
struct RowState {
    float max[2] = {-INFINITY, -INFINITY}; // in powers of two
    float sum[2] = {0.0f, 0.0f};           // this lane's columns only
};

/// Soft cap, then what a row may not see is hidden. Returns the factor that turns scores into powers of two.
template <int KEYS>
__device__ __forceinline__ float cap_and_mask(float (&s)[KEYS / 2], const PrefillParams& p, int key0, const int (&pos)[2], int pos_first,
                                              int pos_last, int c) {
    float to_power = p.scale * LOG2_E;
    if (p.soft_cap > 0.0f) {
        const float in = 2.0f * LOG2_E * p.scale / p.soft_cap;
#pragma unroll
        for (int i = 0; i < KEYS / 2; ++i) s[i] = p.soft_cap - __fdividef(2.0f * p.soft_cap, 1.0f + exp2_approx(fminf(s[i] * in, 80.0f)));
        to_power = LOG2_E;
    }
    const bool newest = key0 + KEYS - 1 > pos_first, oldest = p.window != 0 && key0 <= pos_last - int(p.window);
    if (!newest && !oldest) return to_power;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int high = pos[h] - key0 - 2 * c, low = p.window != 0 ? high - int(p.window) : -KEYS;
#pragma unroll
        for (int i = 0; i < KEYS / 8; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int column = i * 8 + j;
                if (column > high || column <= low) s[i * 4 + h * 2 + j] = -INFINITY;
            }
        }
    }
    return to_power;
}

/// Scores to probabilities in place; returns whether sums so far must be multiplied by `keep`.
template <int KEYS>
__device__ __forceinline__ bool softmax(float (&s)[KEYS / 2], RowState& rows, float (&keep)[2], float to_power) {
    float m[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < KEYS / 8; ++i) {
        m[0] = fmaxf(m[0], fmaxf(s[i * 4], s[i * 4 + 1]));
        m[1] = fmaxf(m[1], fmaxf(s[i * 4 + 2], s[i * 4 + 3]));
    }
    bool over[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        m[h] = fmaxf(m[h], __shfl_xor_sync(~0u, m[h], 1));
        m[h] = fmaxf(m[h], __shfl_xor_sync(~0u, m[h], 2)) * to_power;
        over[h] = m[h] > rows.max[h] + RESCALE_SLACK;
        keep[h] = 1.0f;
    }
    const bool rescale = __any_sync(~0u, over[0] || over[1]);
    if (rescale) {
        // A row's maximum moves by its own scores only: its sums are the same in whatever company it is.
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (!over[h]) continue;
            keep[h] = rows.max[h] == -INFINITY ? 0.0f : exp2_approx(rows.max[h] - m[h]);
            rows.max[h] = m[h];
            rows.sum[h] *= keep[h];
        }
    }
    // A row that has seen nothing yet keeps -inf: subtracting 0 then gives probabilities of 0.
    const float base[2] = {rows.max[0] == -INFINITY ? 0.0f : rows.max[0], rows.max[1] == -INFINITY ? 0.0f : rows.max[1]};
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
        s[i] = exp2_approx(s[i] * to_power - base[i / 2 % 2]);
        sum[i / 2 % 2] += s[i];
    }
    rows.sum[0] += sum[0], rows.sum[1] += sum[1];
    return rescale;
}

} // namespace pagemill
