// Causal attention of many new tokens a sequence over the paged KV cache (their own K and V already written):
// tiled online softmax on Hopper's warpgroup products, K and V brought by the bulk copy engine. Head sizes 64
// and 128; `attention_prefill_any.cu` has the rest and the older chips. Decides the pipeline inside a thread
// block; the list of tiles is the host's (`src/kernels/attention_prefill.rs`).
//
// Letters: E head size, H query heads, K KV heads, G = H / K, B tokens in a block.
// A tile is 128 rows of one KV head; row r of a sequence is query token r / G, head r % G of the group. So K and V
// are read once for all heads of a group, and a chunk of a few tokens still fills the tile.
//
// Three warpgroups: one feeds, two compute 64 rows each over 128 keys at a time, from the newest keys to the
// oldest. Inside a warpgroup the product with V of one step runs under the softmax of the next
// (S = Q K^T of the next step is issued first); between the two, named barriers make one's softmax run under
// the other's products (FlashAttention-3, Shah et al. 2024, without its fp8 part).
//
// A box of the copy engine is min(B, 128) tokens of 64 elements: pages lie anywhere. Rows of V that no query may
// see are cleared, since the memory behind them may hold NaN; hidden scores are replaced, so K needs nothing.
#include "warpgroup.cuh"

namespace pagemill {

constexpr int TILE_ROWS = 128;
constexpr int TILE_KEYS = 128;
constexpr int STAGES = 2;
constexpr int WARPGROUP = 128;
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
    const PrefillTile* tiles;    // [gridDim.x / K], costliest first
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

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

/// Panels of 64 elements side by side, each [rows, 64] swizzled.
template <int E> struct PrefillShared {
    alignas(1024) unsigned char q[TILE_ROWS * E * 2];
    alignas(1024) unsigned char k[STAGES][TILE_KEYS * E * 2];
    alignas(1024) unsigned char v[STAGES][TILE_KEYS * E * 2];
    uint64_t k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

/// What a thread block works on: its tile, and the key steps [step_begin, step_end) it walks downwards.
struct Work {
    PrefillTile tile;
    int kv_head, group;
    int step_begin, step_end;
    int first_visible; // smallest position any row sees
    __device__ Work(const PrefillParams& p) {
        tile = p.tiles[blockIdx.x / p.num_kv_heads];
        kv_head = blockIdx.x % p.num_kv_heads, group = p.num_heads / p.num_kv_heads;
        const int offset = tile.kv_len - tile.q_len, first = tile.first / group;
        const int last = min((tile.first + TILE_ROWS - 1) / group, tile.q_len - 1);
        first_visible = p.window != 0 ? max(0, offset + first + 1 - int(p.window)) : 0;
        step_begin = first_visible / TILE_KEYS;
        step_end = (offset + last) / TILE_KEYS + 1;
    }
    /// Position of row `r` of the tile in its sequence.
    __device__ __forceinline__ int position(int r) const { return tile.kv_len - tile.q_len + (tile.first + r) / group; }
};

/// The feeding warp: brings K and V of every step, page by page.
template <int E> __device__ __forceinline__ void feed(PrefillShared<E>& sh, const PrefillParams& p, const Work& w) {
    const int lane = threadIdx.x % 32, log2 = p.block_size_log2, block_size = 1 << log2;
    const int box_rows = min(block_size, TILE_KEYS), boxes = TILE_KEYS / box_rows;
    const int used_end = w.tile.kv_len; // boxes that start behind it do not exist
    int stage = 0;
    uint32_t parity = 1;
    for (int step = w.step_end - 1; step >= w.step_begin; --step) {
        const int key0 = step * TILE_KEYS + lane * box_rows;
        const bool mine = lane < boxes && key0 < used_end && key0 + box_rows > w.first_visible;
        const uint32_t block = mine ? __ldg(p.block_table + w.tile.table_start + (key0 >> log2)) : 0;
        const uint32_t bytes = __popc(__ballot_sync(~0u, mine)) * box_rows * E * 2;
        const int row = ((block * 2 * p.num_kv_heads + w.kv_head) << log2) + (key0 & (block_size - 1));
        barrier_wait(&sh.k_empty[stage], parity);
        if (lane == 0) barrier_expect(&sh.k_full[stage], bytes);
        __syncwarp();
        if (mine) {
#pragma unroll
            for (int panel = 0; panel < E / 64; ++panel)
                copy_box(&sh.k[stage][panel * TILE_KEYS * 128 + lane * box_rows * 128], &p.kv_map, panel * 64, row, &sh.k_full[stage]);
        }
        barrier_wait(&sh.v_empty[stage], parity);
        if (lane == 0) barrier_expect(&sh.v_full[stage], bytes);
        __syncwarp();
        if (mine) {
            const int v_row = row + (p.num_kv_heads << log2);
#pragma unroll
            for (int panel = 0; panel < E / 64; ++panel)
                copy_box(&sh.v[stage][panel * TILE_KEYS * 128 + lane * box_rows * 128], &p.kv_map, panel * 64, v_row, &sh.v_full[stage]);
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}

/// Brings a warpgroup's 64 query rows into shared memory as cache-type elements, swizzled.
template <class T, int E>
__device__ __forceinline__ void stage_q(PrefillShared<E>& sh, const PrefillParams& p, const Work& w, int row0, int thread) {
    for (int i = thread; i < 64 * (E / 8); i += WARPGROUP) {
        const int row = row0 + i / (E / 8), chunk = i % (E / 8);
        const uint32_t packed_row = w.tile.first + row, token = packed_row / w.group, head = packed_row % w.group;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (token < w.tile.q_len) {
            const size_t at = static_cast<size_t>(w.tile.q_row + token) * p.q_stride + (w.kv_head * w.group + head) * E + chunk * 8;
            if (p.q_type == (T::IS_BF16 ? ACT_BF16 : ACT_F16)) {
                x = *reinterpret_cast<const uint4*>(static_cast<const typename T::Element*>(p.q) + at);
            } else {
                float f[8];
#pragma unroll
                for (int e = 0; e < 8; ++e) f[e] = load_activation(p.q, at + e, p.q_type);
                x = make_uint4(T::pack(f[0], f[1]), T::pack(f[2], f[3]), T::pack(f[4], f[5]), T::pack(f[6], f[7]));
            }
        }
        *reinterpret_cast<uint4*>(&sh.q[(chunk / 8) * TILE_ROWS * 128 + row * 128 + ((chunk % 8) ^ (row % 8)) * 16]) = x;
    }
}

/// Clears V rows [begin, end) of a stage; every warpgroup clears all of them before its own products.
template <int E> __device__ __forceinline__ void clear_v_rows(unsigned char* v, int begin, int end, int thread) {
    const int rows = end - begin;
    for (int i = thread; i < rows * (E / 8); i += WARPGROUP) {
        const int panel = i / (rows * 8), rest = i % (rows * 8);
        *reinterpret_cast<uint4*>(v + panel * TILE_KEYS * 128 + begin * 128 + rest * 16) = make_uint4(0, 0, 0, 0);
    }
}

/// Running softmax of a thread's two rows (g and g + 8 of its warp's 16).
struct RowState {
    float max[2] = {-INFINITY, -INFINITY}; // in powers of two
    float sum[2] = {0.0f, 0.0f};           // this lane's columns only
};

/// Soft cap, then what a row may not see is hidden. Returns the factor that turns scores into powers of two.
__device__ __forceinline__ float cap_and_mask(float (&s)[TILE_KEYS / 2], const PrefillParams& p, int key0, const int (&pos)[2], int pos_first,
                                              int pos_last, int c) {
    float to_power = p.scale * LOG2_E;
    if (p.soft_cap > 0.0f) {
        const float in = 2.0f * LOG2_E * p.scale / p.soft_cap;
#pragma unroll
        for (int i = 0; i < TILE_KEYS / 2; ++i) s[i] = p.soft_cap - __fdividef(2.0f * p.soft_cap, 1.0f + exp2_approx(fminf(s[i] * in, 80.0f)));
        to_power = LOG2_E;
    }
    const bool newest = key0 + TILE_KEYS - 1 > pos_first, oldest = p.window != 0 && key0 <= pos_last - int(p.window);
    if (!newest && !oldest) return to_power;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int high = pos[h] - key0 - 2 * c, low = p.window != 0 ? high - int(p.window) : -TILE_KEYS;
#pragma unroll
        for (int i = 0; i < TILE_KEYS / 8; ++i) {
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
__device__ __forceinline__ bool softmax(float (&s)[TILE_KEYS / 2], RowState& rows, float (&keep)[2], float to_power) {
    float m[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < TILE_KEYS / 8; ++i) {
        m[0] = fmaxf(m[0], fmaxf(s[i * 4], s[i * 4 + 1]));
        m[1] = fmaxf(m[1], fmaxf(s[i * 4 + 2], s[i * 4 + 3]));
    }
    bool over = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        m[h] = fmaxf(m[h], __shfl_xor_sync(~0u, m[h], 1));
        m[h] = fmaxf(m[h], __shfl_xor_sync(~0u, m[h], 2)) * to_power;
        over |= m[h] > rows.max[h] + RESCALE_SLACK;
        keep[h] = 1.0f;
    }
    const bool rescale = __any_sync(~0u, over);
    if (rescale) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            m[h] = fmaxf(m[h], rows.max[h]);
            keep[h] = rows.max[h] == -INFINITY ? 0.0f : exp2_approx(rows.max[h] - m[h]);
            rows.max[h] = m[h];
            rows.sum[h] *= keep[h];
        }
    }
    // A row that has seen nothing yet keeps -inf: subtracting 0 then gives probabilities of 0.
    const float base[2] = {rows.max[0] == -INFINITY ? 0.0f : rows.max[0], rows.max[1] == -INFINITY ? 0.0f : rows.max[1]};
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < TILE_KEYS / 2; ++i) {
        s[i] = exp2_approx(s[i] * to_power - base[i / 2 % 2]);
        sum[i / 2 % 2] += s[i];
    }
    rows.sum[0] += sum[0], rows.sum[1] += sum[1];
    return rescale;
}

/// S = Q K^T of one step.
template <class T, int E> __device__ __forceinline__ void issue_scores(float (&s)[TILE_KEYS / 2], uint32_t q, uint32_t k) {
#pragma unroll
    for (int e = 0; e < E / 16; ++e) {
        const uint32_t panel = e / 4, inside = e % 4 * 32;
        wgmma_n128_ss<T, 0>(s, k_major_descriptor(q + panel * TILE_ROWS * 128 + inside), k_major_descriptor(k + panel * TILE_KEYS * 128 + inside), e > 0);
    }
}

/// O += P V of one step.
template <class T, int E>
__device__ __forceinline__ void issue_output(float (&o)[E / 2], const uint32_t (&prob)[TILE_KEYS / 16][4], uint32_t v, bool accumulate) {
#pragma unroll
    for (int t = 0; t < TILE_KEYS / 16; ++t) {
        const uint64_t b = mn_major_descriptor(v + t * 16 * 128, TILE_KEYS * 128);
        if constexpr (E == 128) wgmma_n128_rs<T, 1>(o, prob[t], b, accumulate || t > 0);
        else wgmma_n64_rs<T, 1>(o, prob[t], b, accumulate || t > 0);
    }
}

template <class T> __device__ __forceinline__ void pack_probabilities(uint32_t (&prob)[TILE_KEYS / 16][4], const float (&s)[TILE_KEYS / 2]) {
#pragma unroll
    for (int t = 0; t < TILE_KEYS / 16; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) prob[t][i] = T::pack(s[t * 8 + i * 2], s[t * 8 + i * 2 + 1]);
}

/// Divides by the sums and writes a warpgroup's 64 rows.
template <class T, int E>
__device__ __forceinline__ void write_output(PrefillShared<E>& sh, const PrefillParams& p, const Work& w, float (&o)[E / 2], RowState& rows,
                                             int row0, int thread, int barrier) {
    const int warp = thread / 32, g = thread % 32 / 4, c = thread % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = row0 + warp * 16 + g + h * 8;
        const uint32_t packed_row = w.tile.first + row, token = packed_row / w.group, head = w.kv_head * w.group + packed_row % w.group;
        float sum = rows.sum[h];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (p.sinks != nullptr) sum += exp2f(p.sinks[head] * LOG2_E - rows.max[h]);
        const float weight = sum > 0.0f ? 1.0f / sum : 0.0f;
        if (p.out_type == ACT_F32) {
            if (token >= w.tile.q_len) continue;
            float* to = static_cast<float*>(p.out) + static_cast<size_t>(w.tile.q_row + token) * p.out_stride + head * E + 2 * c;
#pragma unroll
            for (int i = 0; i < E / 8; ++i) *reinterpret_cast<float2*>(to + i * 8) = make_float2(o[i * 4 + h * 2] * weight, o[i * 4 + h * 2 + 1] * weight);
        } else {
#pragma unroll
            for (int i = 0; i < E / 8; ++i) {
                const float x = o[i * 4 + h * 2] * weight, y = o[i * 4 + h * 2 + 1] * weight;
                const uint32_t packed = p.out_type == ACT_BF16 ? Bf16::pack(x, y) : F16::pack(x, y);
                *reinterpret_cast<uint32_t*>(&sh.q[(i / 8) * TILE_ROWS * 128 + row * 128 + ((i % 8) ^ (row % 8)) * 16 + c * 4]) = packed;
            }
        }
    }
    if (p.out_type == ACT_F32) return;
    named_sync(barrier, WARPGROUP);
    for (int i = thread; i < 64 * (E / 8); i += WARPGROUP) {
        const int row = row0 + i / (E / 8), chunk = i % (E / 8);
        const uint32_t packed_row = w.tile.first + row, token = packed_row / w.group, head = w.kv_head * w.group + packed_row % w.group;
        if (token >= w.tile.q_len) continue;
        const size_t at = static_cast<size_t>(w.tile.q_row + token) * p.out_stride + head * E + chunk * 8;
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + at) =
            *reinterpret_cast<const uint4*>(&sh.q[(chunk / 8) * TILE_ROWS * 128 + row * 128 + ((chunk % 8) ^ (row % 8)) * 16]);
    }
}

/// A computing warpgroup: 64 rows over all steps.
template <class T, int E>
__device__ __forceinline__ void compute(PrefillShared<E>& sh, const PrefillParams& p, const Work& w, int wg, int thread) {
    const int row0 = wg * 64, warp = thread / 32, lane = thread % 32, g = lane / 4, c = lane % 4;
    const int own_turn = 1 + wg, other_turn = 2 - wg, own_rows = 3 + wg;
    const int pos[2] = {w.position(row0 + warp * 16 + g), w.position(row0 + warp * 16 + g + 8)};
    const int pos_first = w.position(row0), pos_last = w.position(row0 + 63);
    stage_q<T, E>(sh, p, w, row0, thread);
    fence_async_proxy();
    named_sync(own_rows, WARPGROUP);
    const uint32_t q = shared_address(sh.q) + row0 * 128;

    float s[TILE_KEYS / 2], o[E / 2];
    uint32_t prob[TILE_KEYS / 16][4];
    RowState rows;
    float keep[2];
    int stage = 0, step = w.step_end - 1;
    uint32_t parity = 0;

    auto release = [&](uint64_t* bar) {
        if (lane == 0) barrier_arrive(bar);
    };
    auto await_v = [&](int v_stage, uint32_t v_parity, int v_step) {
        barrier_wait(&sh.v_full[v_stage], v_parity);
        const int key0 = v_step * TILE_KEYS, hidden_below = w.first_visible - key0, hidden_from = int(w.tile.kv_len) - key0;
        if (hidden_below <= 0 && hidden_from >= TILE_KEYS) return;
        if (hidden_below > 0) clear_v_rows<E>(sh.v[v_stage], 0, hidden_below, thread);
        if (hidden_from < TILE_KEYS) clear_v_rows<E>(sh.v[v_stage], hidden_from, TILE_KEYS, thread);
        fence_async_proxy();
        named_sync(own_rows, WARPGROUP);
    };

    if (wg == 1) named_arrive(other_turn, 2 * WARPGROUP);
    barrier_wait(&sh.k_full[0], 0);
    named_sync(own_turn, 2 * WARPGROUP);
    wgmma_fence();
    issue_scores<T, E>(s, q, shared_address(sh.k[0]));
    wgmma_commit();
    if (wg == 0 || step > w.step_begin) named_arrive(other_turn, 2 * WARPGROUP);
    wgmma_wait<0>();
    wgmma_pin(s);
    release(&sh.k_empty[0]);
    softmax(s, rows, keep, cap_and_mask(s, p, step * TILE_KEYS, pos, pos_first, pos_last, c));
    pack_probabilities<T>(prob, s);

    bool started = false;
    for (; step > w.step_begin; --step) {
        const int v_stage = stage;
        const uint32_t v_parity = parity;
        if (++stage == STAGES) stage = 0, parity ^= 1;
        barrier_wait(&sh.k_full[stage], parity);
        await_v(v_stage, v_parity, step);
        named_sync(own_turn, 2 * WARPGROUP);
        wgmma_fence();
        issue_scores<T, E>(s, q, shared_address(sh.k[stage]));
        wgmma_commit();
        issue_output<T, E>(o, prob, shared_address(sh.v[v_stage]), started);
        wgmma_commit();
        started = true;
        if (wg == 0 || step - 1 > w.step_begin) named_arrive(other_turn, 2 * WARPGROUP);
        wgmma_wait<1>();
        wgmma_pin(s);
        release(&sh.k_empty[stage]);
        const bool rescale = softmax(s, rows, keep, cap_and_mask(s, p, (step - 1) * TILE_KEYS, pos, pos_first, pos_last, c));
        wgmma_wait<0>();
        wgmma_pin(o);
        release(&sh.v_empty[v_stage]);
        if (rescale) {
#pragma unroll
            for (int i = 0; i < E / 2; ++i) o[i] *= keep[i / 2 % 2];
        }
        pack_probabilities<T>(prob, s);
    }
    await_v(stage, parity, step);
    wgmma_fence();
    issue_output<T, E>(o, prob, shared_address(sh.v[stage]), started);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(o);
    write_output<T, E>(sh, p, w, o, rows, row0, thread, own_rows);
}

template <class T, int E> __device__ __forceinline__ void attention_prefill(const PrefillParams& p) {
    static_assert(E == 64 || E == 128, "panels are 64 elements wide and O has one product a step");
    extern __shared__ unsigned char shared_bytes[];
    auto& sh = *reinterpret_cast<PrefillShared<E>*>((reinterpret_cast<uintptr_t>(shared_bytes) + 1023) & ~uintptr_t(1023));
    const int warpgroup = threadIdx.x / WARPGROUP, thread = threadIdx.x % WARPGROUP;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&sh.k_full[i], 1), barrier_init(&sh.v_full[i], 1);
            barrier_init(&sh.k_empty[i], 8), barrier_init(&sh.v_empty[i], 8); // a lane of each computing warp
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    wait_for_previous_kernel();
    release_next_kernel();
    const Work w(p);
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (thread < 32) feed<E>(sh, p, w);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        compute<T, E>(sh, p, w, warpgroup - 1, thread);
    }
}

#else

template <class T, int E> __device__ __forceinline__ void attention_prefill(const PrefillParams&) {}

#endif

} // namespace pagemill

#define PREFILL_KERNEL(name, T, E)                                                                                  \
    extern "C" __global__ void __launch_bounds__(384, 1)                                                            \
        attention_prefill_##name(const __grid_constant__ pagemill::PrefillParams p) {                               \
        pagemill::attention_prefill<pagemill::T, E>(p);                                                             \
    }

PREFILL_KERNEL(bf16_e64, Bf16, 64)
PREFILL_KERNEL(bf16_e128, Bf16, 128)
PREFILL_KERNEL(f16_e64, F16, 64)
PREFILL_KERNEL(f16_e128, F16, 128)
