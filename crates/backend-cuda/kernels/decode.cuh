// What a warp of decode attention does: which tile is next, its loads, scores, the online softmax and the sums.
// Decides how K and V reach the tensor cores; `attention_decode.cu` has the rest, and the letters.
#pragma once
#include "cluster.cuh"

namespace pagemill {

constexpr int TILE_TOKENS = 16;
constexpr float RESCALE_SLACK = 8.0f; // in powers of two

/// A run of tiles of one sequence; made by the host. Tiles count 16 tokens from position 0.
struct DecodePiece {
    uint32_t q_row;       // row of the token in q and out
    uint32_t table_start; // where the sequence's table starts in block_table
    uint32_t kv_len;      // tokens in the cache, this step's included
    uint32_t tile_begin;  // half-open range of tiles; each holds at least one visible token
    uint32_t tile_end;
    uint32_t slot;        // this piece's partial result; unused if num_slots == 1
    uint32_t first_slot;  // slots of the sequence: first_slot .. first_slot + num_slots
    uint32_t num_slots;
};

struct DecodeParams {
    const void* q;                   // [T, q_stride] elements of q_type; head h at h * E
    void* out;                       // [T, out_stride] elements of out_type
    const void* kv;                  // pool tensor
    const uint32_t* block_table;     // all sequences, end to end
    const DecodePiece* pieces;       // grouped by thread block
    const uint32_t* piece_start;     // [gridDim.x + 1]
    float* partial_out;              // [slots, H, E]
    float2* partial_max_sum;         // [slots, H]: maximum in powers of two, sum
    uint32_t* arrivals;              // [slots, gridDim.y], zero between launches
    const float* sinks;              // [H] or null
    float scale;                     // multiplies q·k
    float soft_cap;                  // 0: none
    uint32_t window;                 // 0: none; else positions > kv_len - 1 - window are visible
    uint32_t num_heads;
    uint32_t num_kv_heads;
    uint32_t block_size_log2;
    uint32_t q_stride;
    uint32_t out_stride;
    uint32_t q_type;                 // ActivationType
    uint32_t out_type;               // ActivationType
};
static_assert(sizeof(DecodePiece) == 32 && sizeof(DecodeParams) == 120, "src/kernels/attention_decode.rs has the same structs");

/// Where a warp's next tile lies: runs one tile ahead of the arithmetic, its block id one more.
struct TileCursor {
    uint32_t piece;
    uint32_t tile;
    uint32_t tile_end;
    uint32_t table_start;
    uint32_t block;
    bool valid;
};

template <int E> struct TileRegisters {
    static constexpr int STEPS = E / 16;
    uint32_t k[2][STEPS * 2]; // token rows g and g + 8
    uint32_t v[4][STEPS];     // tokens 2c, 2c + 1, 2c + 8, 2c + 9; pairs of dims
};

/// First of the two neighbouring dims that register `step` of V (and of the output) holds in lane group g.
template <int E> __device__ __forceinline__ int dim_of(int step, int g) {
    constexpr int FULL = E / 64;
    if (step < FULL * 4) return (step / 4) * 64 + g * 8 + (step % 4) * 2;
    constexpr int REST = E % 64; // 0, 16 or 32
    return FULL * 64 + g * (REST / 8) + (step - FULL * 4) * 2;
}

template <int E> __device__ __forceinline__ void load_k_row(uint32_t (&r)[E / 16 * 2], const char* row, int c) {
#pragma unroll
    for (int j = 0; j < E / 32; ++j) {
        uint4 x = stream16(row + j * 64 + c * 16);
        r[j * 4] = x.x, r[j * 4 + 1] = x.y, r[j * 4 + 2] = x.z, r[j * 4 + 3] = x.w;
    }
    if constexpr (E % 32 != 0) {
        uint2 x = stream8(row + (E / 32) * 64 + c * 8);
        r[E / 16 * 2 - 2] = x.x, r[E / 16 * 2 - 1] = x.y;
    }
}

template <int E> __device__ __forceinline__ void load_v_row(uint32_t (&r)[E / 16], const char* row, int g) {
#pragma unroll
    for (int j = 0; j < E / 64; ++j) {
        uint4 x = stream16(row + j * 128 + g * 16);
        r[j * 4] = x.x, r[j * 4 + 1] = x.y, r[j * 4 + 2] = x.z, r[j * 4 + 3] = x.w;
    }
    if constexpr (E % 64 == 32) {
        uint2 x = stream8(row + (E / 64) * 128 + g * 8);
        r[E / 16 - 2] = x.x, r[E / 16 - 1] = x.y;
    }
    if constexpr (E % 64 == 16) r[E / 16 - 1] = stream4(row + (E / 64) * 128 + g * 4);
}

/// Moves to the warp's next tile (`WARPS` further, or into the next piece) and asks for its block id.
template <int WARPS>
__device__ __forceinline__ void advance(TileCursor& cur, uint32_t piece_end, int warp, const DecodeParams& p) {
    cur.tile += WARPS;
    while (cur.tile >= cur.tile_end) {
        if (++cur.piece >= piece_end) {
            cur.valid = false;
            return;
        }
        const DecodePiece& next = p.pieces[cur.piece];
        cur.table_start = next.table_start;
        cur.tile = next.tile_begin + warp;
        cur.tile_end = next.tile_end;
    }
    cur.block = __ldg(p.block_table + cur.table_start + (cur.tile * TILE_TOKENS >> p.block_size_log2));
}

/// A warp's running softmax over its tiles: two heads (columns 2c and 2c + 1) in each of NT column tiles.
template <int E, int NT> struct WarpState {
    float o[NT][E / 16][4];
    float max[NT][2]; // in powers of two
    float sum[NT][2]; // this lane's tokens only
};

template <class T, int E, int NT>
__device__ __forceinline__ void scores(float (&s)[NT][4], const TileRegisters<E>& r, const uint32_t* q, int g, int c) {
    constexpr int Q_WORDS = E / 2 + 16; // padded row: lane groups fall into different banks
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
        const uint32_t* row = q + (n * 8 + g) * Q_WORDS;
#pragma unroll
        for (int j = 0; j < E / 32; ++j) {
            uint4 b = *reinterpret_cast<const uint4*>(row + j * 16 + c * 4);
            const uint32_t a0[4] = {r.k[0][j * 4], r.k[1][j * 4], r.k[0][j * 4 + 1], r.k[1][j * 4 + 1]};
            T::mma(s[n], a0, b.x, b.y);
            const uint32_t a1[4] = {r.k[0][j * 4 + 2], r.k[1][j * 4 + 2], r.k[0][j * 4 + 3], r.k[1][j * 4 + 3]};
            T::mma(s[n], a1, b.z, b.w);
        }
        if constexpr (E % 32 != 0) {
            constexpr int L = E / 16 * 2 - 2;
            uint2 b = *reinterpret_cast<const uint2*>(row + (E / 32) * 16 + c * 2);
            const uint32_t a[4] = {r.k[0][L], r.k[1][L], r.k[0][L + 1], r.k[1][L + 1]};
            T::mma(s[n], a, b.x, b.y);
        }
    }
}

/// Scores to powers of two, with soft cap, and with what lies outside [first, kv_len) hidden.
template <int NT>
__device__ __forceinline__ void scale_and_mask(float (&s)[NT][4], const DecodeParams& p, uint32_t token0, uint32_t first,
                                               uint32_t kv_len, int g) {
    const bool edge = token0 < first || token0 + TILE_TOKENS > kv_len;
    const float to_power = p.scale * LOG2_E;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (p.soft_cap > 0.0f) s[n][i] = p.soft_cap * tanhf(s[n][i] * p.scale / p.soft_cap) * LOG2_E;
            else s[n][i] *= to_power;
            if (edge) {
                uint32_t token = token0 + g + (i / 2) * 8;
                if (token < first || token >= kv_len) s[n][i] = -INFINITY;
            }
        }
    }
}

/// Raises the running maximum where a score exceeds it by more than the slack, and rescales what was summed.
template <int E, int NT> __device__ __forceinline__ void raise_maximum(WarpState<E, NT>& st, const float (&s)[NT][4]) {
    bool over = false;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) over |= s[n][i] > st.max[n][i % 2] + RESCALE_SLACK;
    if (!__any_sync(~0u, over)) return;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float m = fmaxf(s[n][h], s[n][h + 2]);
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 4));
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 8));
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 16));
            m = fmaxf(m, st.max[n][h]);
            float keep = st.max[n][h] == -INFINITY ? 0.0f : exp2_approx(st.max[n][h] - m);
            st.max[n][h] = m;
            st.sum[n][h] *= keep;
#pragma unroll
            for (int d = 0; d < E / 16; ++d) st.o[n][d][h] *= keep, st.o[n][d][h + 2] *= keep;
        }
    }
}

/// Hides V rows outside [first, kv_len): their probability is 0, but the memory may hold anything, NaN too.
template <int E>
__device__ __forceinline__ void clear_hidden_v(TileRegisters<E>& r, uint32_t token0, uint32_t first, uint32_t kv_len, int c) {
    if (token0 >= first && token0 + TILE_TOKENS <= kv_len) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t token = token0 + 2 * c + (i & 1) + (i / 2) * 8;
        if (token >= first && token < kv_len) continue;
#pragma unroll
        for (int d = 0; d < E / 16; ++d) r.v[i][d] = 0;
    }
}

template <class T, int E, int NT>
__device__ __forceinline__ void accumulate(WarpState<E, NT>& st, const TileRegisters<E>& r, const float (&s)[NT][4]) {
    uint32_t b[NT][2];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        float e[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) e[i] = exp2_approx(s[n][i] - st.max[n][i % 2]);
        st.sum[n][0] += e[0] + e[2];
        st.sum[n][1] += e[1] + e[3];
        b[n][0] = transpose8x8(T::pack(e[0], e[1]));
        b[n][1] = transpose8x8(T::pack(e[2], e[3]));
    }
#pragma unroll
    for (int d = 0; d < E / 16; ++d) {
        const uint32_t a[4] = {__byte_perm(r.v[0][d], r.v[1][d], 0x5410), __byte_perm(r.v[0][d], r.v[1][d], 0x7632),
                               __byte_perm(r.v[2][d], r.v[3][d], 0x5410), __byte_perm(r.v[2][d], r.v[3][d], 0x7632)};
#pragma unroll
        for (int n = 0; n < NT; ++n) T::mma(st.o[n][d], a, b[n][0], b[n][1]);
    }
}

} // namespace pagemill
