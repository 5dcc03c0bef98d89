// Causal attention of many new tokens a sequence over the paged KV cache (their own K and V already written):
// tiled online softmax on Hopper's warpgroup products, K and V brought by the bulk copy engine. Head sizes 64
// and 128; `attention_prefill_any.cu` has the rest and the older chips. Decides the pipeline inside a thread
// block; the list of tiles is the host's (`src/kernels/attention_prefill.rs`).
//
// Letters: E head size, H query heads, K KV heads, G = H / K, B tokens in a block.
// A tile is 128 rows of one KV head; row r of a sequence is query token r / G, head r % G of the group. So K and V
// are read once for all heads of a group, and a chunk of a few tokens still fills the tile.
//
// Thread blocks stay and take tile after tile, as the host shared them out (one KV head after the other, so that
// its K and V stay in the L2 cache while they are read by all; equal loads). Three warpgroups: one feeds (a warp brings K and V, the others the queries of the tile after this one), two compute
// 64 rows each over 128 keys at a time, from the newest keys to the oldest. Inside a warpgroup the product with V of one step runs under the softmax of the next
// (S = Q K^T of the next step is issued first); between the two, named barriers make one's softmax run under
// the other's products (FlashAttention-3, Shah et al. 2024, without its fp8 part).
//
// A box of the copy engine is min(B, 128) tokens of 64 elements: pages lie anywhere. Rows of V that no query may
// see are cleared, since the memory behind them may hold NaN; hidden scores are replaced, so K needs nothing.
#include "prefill.cuh"
#include "warpgroup.cuh"

namespace pagemill {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

constexpr int TILE_ROWS = 128;
constexpr int TILE_KEYS = 128;
using Work = PrefillWork<TILE_ROWS, TILE_KEYS>;
constexpr int STAGES = 2;
constexpr int WARPGROUP = 128;

/// Panels of 64 elements side by side, each [rows, 64] swizzled.
template <int E> struct PrefillShared {
    alignas(1024) unsigned char q[2][TILE_ROWS * E * 2];
    alignas(1024) unsigned char k[STAGES][TILE_KEYS * E * 2];
    alignas(1024) unsigned char v[STAGES][TILE_KEYS * E * 2];
    uint64_t k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    uint64_t q_full[2], q_empty[2];
};

static_assert(sizeof(PrefillShared<128>) + 1024 == 198656, "src/kernels/attention_prefill.rs counts the same bytes");

/// The work of a thread block, in order.
struct Turns {
    const uint32_t* work;
    uint32_t count, round = 0;
    __device__ __forceinline__ explicit Turns(const PrefillParams& p) {
        const uint32_t begin = __ldg(p.work_start + blockIdx.x);
        work = p.work + begin, count = __ldg(p.work_start + blockIdx.x + 1) - begin;
    }
    __device__ __forceinline__ uint32_t index() const { return __ldg(work + round); }
    __device__ __forceinline__ bool done() const { return round >= count; }
    __device__ __forceinline__ bool last() const { return round + 1 >= count; }
};

constexpr int Q_THREADS = 96; // warps 1 to 3 of the feeding warpgroup

/// The feeding warp: brings K and V of every step of a tile, page by page.
template <int E> __device__ __forceinline__ void feed(PrefillShared<E>& sh, const PrefillParams& p, const Work& w, int& stage, uint32_t& parity) {
    const int lane = threadIdx.x % 32, log2 = p.block_size_log2, block_size = 1 << log2;
    const int box_rows = min(block_size, TILE_KEYS), boxes = TILE_KEYS / box_rows;
    const int used_end = w.tile.kv_len; // boxes that start behind it do not exist
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

/// Brings a tile's query rows into shared memory as cache-type elements, swizzled. All are on their way at once.
template <class T, int E>
__device__ __forceinline__ void stage_q(unsigned char* to, const PrefillParams& p, const Work& w, int thread) {
    auto place = [&](int i) {
        const int row = i / (E / 8), chunk = i % (E / 8);
        return to + (chunk / 8) * TILE_ROWS * 128 + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
    };
#pragma unroll 2
    for (int i = thread; i < TILE_ROWS * (E / 8); i += Q_THREADS) {
        const uint32_t packed_row = w.tile.first + i / (E / 8), token = packed_row / w.group, head = packed_row % w.group;
        const bool wanted = token < w.tile.q_len;
        const size_t at = static_cast<size_t>(w.tile.q_row + (wanted ? token : 0)) * p.q_stride + (w.kv_head * w.group + head) * E + i % (E / 8) * 8;
        ask_for_q<T>(place(i), p, at, wanted);
    }
    commit_copies();
    await_copies<0>();
#pragma unroll 2
    for (int i = thread; i < TILE_ROWS * (E / 8); i += Q_THREADS) turn_q<T>(place(i), p.q_type);
}

/// Clears V rows [begin, end) of a stage; every warpgroup clears all of them before its own products.
template <int E> __device__ __forceinline__ void clear_v_rows(unsigned char* v, int begin, int end, int thread) {
    const int rows = end - begin;
    for (int i = thread; i < rows * (E / 8); i += WARPGROUP) {
        const int panel = i / (rows * 8), rest = i % (rows * 8);
        *reinterpret_cast<uint4*>(v + panel * TILE_KEYS * 128 + begin * 128 + rest * 16) = make_uint4(0, 0, 0, 0);
    }
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

/// Divides by the sums and writes a warpgroup's 64 rows, by way of its part of the query buffer.
template <class T, int E>
__device__ __forceinline__ void write_output(unsigned char* staging, const PrefillParams& p, const Work& w, float (&o)[E / 2], RowState& rows,
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
                *reinterpret_cast<uint32_t*>(staging + (i / 8) * TILE_ROWS * 128 + row * 128 + ((i % 8) ^ (row % 8)) * 16 + c * 4) = packed;
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
            *reinterpret_cast<const uint4*>(staging + (chunk / 8) * TILE_ROWS * 128 + row * 128 + ((chunk % 8) ^ (row % 8)) * 16);
    }
}

/// Which stage of K and V comes next, and its parity.
struct Pipe {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

/// A computing warpgroup: 64 rows of a tile over all its steps. `last` is the thread block's last tile.
template <class T, int E>
__device__ __forceinline__ void compute(PrefillShared<E>& sh, const PrefillParams& p, const Work& w, unsigned char* q_buffer, Pipe& pipe, bool last, int wg,
                                        int thread) {
    const int row0 = wg * 64, warp = thread / 32, lane = thread % 32, g = lane / 4, c = lane % 4;
    const int own_turn = 1 + wg, other_turn = 2 - wg, own_rows = 3 + wg;
    const int pos[2] = {w.position(row0 + warp * 16 + g), w.position(row0 + warp * 16 + g + 8)};
    const int pos_first = w.position(row0), pos_last = w.position(row0 + 63);
    const uint32_t q = shared_address(q_buffer) + row0 * 128;

    float s[TILE_KEYS / 2], o[E / 2];
    uint32_t prob[TILE_KEYS / 16][4];
    RowState rows;
    float keep[2];
    int step = w.step_end - 1;

    auto release = [&](uint64_t* bar) {
        if (lane == 0) barrier_arrive(bar);
    };
    auto await_v = [&](const Pipe& v, int v_step) {
        barrier_wait(&sh.v_full[v.stage], v.parity);
        const int key0 = v_step * TILE_KEYS, hidden_below = w.first_visible - key0, hidden_from = int(w.tile.kv_len) - key0;
        if (hidden_below <= 0 && hidden_from >= TILE_KEYS) return;
        if (hidden_below > 0) clear_v_rows<E>(sh.v[v.stage], 0, hidden_below, thread);
        if (hidden_from < TILE_KEYS) clear_v_rows<E>(sh.v[v.stage], hidden_from, TILE_KEYS, thread);
        fence_async_proxy();
        named_sync(own_rows, WARPGROUP);
    };

    barrier_wait(&sh.k_full[pipe.stage], pipe.parity);
    named_sync(own_turn, 2 * WARPGROUP);
    wgmma_fence();
    issue_scores<T, E>(s, q, shared_address(sh.k[pipe.stage]));
    wgmma_commit();
    if (wg == 0 || !last || step > w.step_begin) named_arrive(other_turn, 2 * WARPGROUP);
    wgmma_wait<0>();
    wgmma_pin(s);
    release(&sh.k_empty[pipe.stage]);
    softmax<TILE_KEYS>(s, rows, keep, cap_and_mask<TILE_KEYS>(s, p, step * TILE_KEYS, pos, pos_first, pos_last, c));
    pack_probabilities<T>(prob, s);

    bool started = false;
    for (; step > w.step_begin; --step) {
        const Pipe v = pipe;
        pipe.next();
        barrier_wait(&sh.k_full[pipe.stage], pipe.parity);
        await_v(v, step);
        named_sync(own_turn, 2 * WARPGROUP);
        wgmma_fence();
        issue_scores<T, E>(s, q, shared_address(sh.k[pipe.stage]));
        wgmma_commit();
        issue_output<T, E>(o, prob, shared_address(sh.v[v.stage]), started);
        wgmma_commit();
        started = true;
        if (wg == 0 || !last || step - 1 > w.step_begin) named_arrive(other_turn, 2 * WARPGROUP);
        wgmma_wait<1>();
        wgmma_pin(s);
        release(&sh.k_empty[pipe.stage]);
        const bool rescale = softmax<TILE_KEYS>(s, rows, keep, cap_and_mask<TILE_KEYS>(s, p, (step - 1) * TILE_KEYS, pos, pos_first, pos_last, c));
        wgmma_wait<0>();
        wgmma_pin(o);
        release(&sh.v_empty[v.stage]);
        if (rescale) {
#pragma unroll
            for (int i = 0; i < E / 2; ++i) o[i] *= keep[i / 2 % 2];
        }
        pack_probabilities<T>(prob, s);
    }
    await_v(pipe, step);
    wgmma_fence();
    issue_output<T, E>(o, prob, shared_address(sh.v[pipe.stage]), started);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(o);
    release(&sh.v_empty[pipe.stage]);
    pipe.next();
    write_output<T, E>(q_buffer, p, w, o, rows, row0, thread, own_rows);
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
        for (int i = 0; i < 2; ++i) barrier_init(&sh.q_full[i], Q_THREADS), barrier_init(&sh.q_empty[i], 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    wait_for_previous_kernel();
    release_next_kernel();
    Turns turns(p);
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (thread < 32) {
            int stage = 0;
            uint32_t parity = 1;
            for (; !turns.done(); ++turns.round) feed<E>(sh, p, Work(p, turns.index()), stage, parity);
        } else {
            for (; !turns.done(); ++turns.round) {
                const int buffer = turns.round % 2;
                barrier_wait(&sh.q_empty[buffer], (turns.round / 2 + 1) % 2);
                stage_q<T, E>(sh.q[buffer], p, Work(p, turns.index()), thread - 32);
                fence_async_proxy();
                barrier_arrive(&sh.q_full[buffer]);
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int wg = warpgroup - 1;
        Pipe pipe;
        // The first turn is warpgroup 0's; afterwards each gives the turn to the other.
        if (wg == 1) named_arrive(1, 2 * WARPGROUP);
        for (; !turns.done(); ++turns.round) {
            const int buffer = turns.round % 2;
            barrier_wait(&sh.q_full[buffer], turns.round / 2 % 2);
            compute<T, E>(sh, p, Work(p, turns.index()), sh.q[buffer], pipe, turns.last(), wg, thread);
            __syncwarp();
            if (thread % 32 == 0) barrier_arrive(&sh.q_empty[buffer]);
        }
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
