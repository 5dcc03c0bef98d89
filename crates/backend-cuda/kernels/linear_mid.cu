// y [M, N] = x [M, C] · W [N, C]^T for M up to 128 on Hopper: reads every weight once, near memory bandwidth, and
// multiplies on the tensor cores by whole warpgroups. Decides how a thread block brings weights and in which order
// sums are added; the host (`src/kernels/linear_mid.rs`) picks the form. Knows no layer.
//
// Letters: M tokens, N output features, C input features. The product is taken as y^T = W x^T: W is the A operand,
// so that its many rows fill the tensor cores whatever M is, and x the B operand, one column a token. A panel is 64
// elements of C (one swizzled row of shared memory); a slab 64 rows of W (one product's height).
//
// Two thread blocks (ranks) are a cluster and share slabs: each takes half of C, two slabs at a time, and sends its sums
// to the rank that owns the rows, which adds them in the order of C. Clusters share the slabs out evenly. So a row's bits
// depend on its token and the weight only: not on M, nor on the form, nor on what else is in the launch.
//
// One warp feeds: boxes of W through a ring of stages, and x: once for all slabs where a rank's part fits, else with
// every stage. The first stages' weights are asked for before waiting for the previous kernel, since weights do not
// depend on it. Two warpgroups multiply, a slab each.
//
// The gated form takes one slab from the gate and the same from up: both sums of an output meet where they are added up.
// Up to three products of one x (q, k, v) share a launch: their slabs follow each other.
//
// Tried (NOTES.md): all panels of all tiles cut into equal ranges over all multiprocessors, with partial sums in memory:
// adding up took 4 to 5 us a product. Four ranks: of 132 multiprocessors only 30 clusters of four are there at once. A
// stage given back when the next is under way: a stage less to bring weights into. Warpgroups that share slabs by
// tokens: every weight is read twice from shared memory.
#include "cluster_barriers.cuh"
#include "warpgroup_narrow.cuh"

namespace pagemill {

constexpr int MID_PARTS = 3;
constexpr int SLAB_BYTES = 64 * 128; // 64 rows of a panel
constexpr int MULTIPLIERS = 256;     // threads of the two warpgroups that multiply
constexpr int MID_THREADS = MULTIPLIERS + 32;

/// One product of x.
struct LinearMidPart {
    const float* bias; // [N] or null
    void* y;           // [M, y_stride] elements of y_type
    uint32_t n;
    uint32_t y_stride;
};

struct LinearMidParams {
    CUtensorMap x_map;              // [M, C], boxes of 64 columns and the form's columns of tokens
    CUtensorMap w_map[MID_PARTS];   // [N, C], boxes of 64 columns and 64 rows; gated: gate, up
    LinearMidPart parts[MID_PARTS]; // behind the last: n is 0; gated: the first only, without bias
    uint32_t m;                     // 1 ..= the form's columns
    uint32_t num_slabs;             // of all parts; gated: pairs of one of the gate and one of up
    uint32_t num_panels;            // of C
    uint32_t y_type;                // ActivationType: F32 or BF16
    uint32_t activation;            // GateActivation
};
static_assert(sizeof(LinearMidPart) == 24 && sizeof(LinearMidParams) == 640, "src/kernels/linear_mid.rs has the same");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

/// X_SLOTS panels of x are kept where a rank's part of C has no more; else each stage has one.
template <int COLUMNS, int STAGES, int X_SLOTS, int RANKS> struct MidShared {
    static constexpr int FRAGMENTS = 4 / RANKS * COLUMNS / 8; // of 16 rows and 8 columns, in the rows that it owns of a slab
    alignas(1024) unsigned char w[STAGES][2][SLAB_BYTES];
    unsigned char x[X_SLOTS][COLUMNS * 128];
    float4 sums[2][RANKS][FRAGMENTS][32]; // of this thread block's rows of both slabs, by who sent them
    uint64_t full[STAGES], empty[STAGES], x_full[X_SLOTS], sums_full, sums_empty;
};

/// What a thread block works on: slabs [slab, slab_end), panels [panel, panel_end) of each.
template <int RANKS> struct Range {
    uint32_t rank, slab, slab_end, panel, panel_end;
    __device__ __forceinline__ explicit Range(const LinearMidParams& p) {
        const uint32_t cluster = blockIdx.x / RANKS, clusters = gridDim.x / RANKS;
        rank = blockIdx.x % RANKS;
        slab = cluster * p.num_slabs / clusters, slab_end = (cluster + 1) * p.num_slabs / clusters;
        panel = rank * p.num_panels / RANKS, panel_end = (rank + 1) * p.num_panels / RANKS;
    }
};

/// The part that `slab` belongs to; `slab` becomes its number there.
template <bool GATED> __device__ __forceinline__ uint32_t part_of(const LinearMidParams& p, uint32_t& slab) {
    if constexpr (!GATED) {
#pragma unroll
        for (uint32_t i = 0; i + 1 < MID_PARTS; ++i) {
            const uint32_t slabs = (p.parts[i].n + 63) / 64;
            if (slab < slabs) return i;
            slab -= slabs;
        }
        return MID_PARTS - 1;
    }
    return 0;
}

/// As `copy_box`, of what is read once: the first to leave the L2 cache.
__device__ __forceinline__ void copy_box_once(void* to, const CUtensorMap* map, int column, int row, uint64_t* bar) {
    asm volatile("{ .reg .b64 once; createpolicy.fractional.L2::evict_first.b64 once, 1.0;"
                 " cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], once; }"
                 ::"r"(shared_address(to)), "l"(map), "r"(column), "r"(row), "r"(shared_address(bar)) : "memory");
}

/// Sums of 16 features from `row0` and 8 tokens from `token0`, held as a C fragment, to their place.
__device__ __forceinline__ void store_fragment(const LinearMidParams& p, const LinearMidPart& part, uint32_t row0, uint32_t token0, float4 sums) {
    const uint32_t g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    float v[4] = {sums.x, sums.y, sums.z, sums.w};
    if (part.bias != nullptr) {
        const float low = row0 + g < part.n ? part.bias[row0 + g] : 0.0f, high = row0 + 8 + g < part.n ? part.bias[row0 + 8 + g] : 0.0f;
        v[0] += low, v[1] += low, v[2] += high, v[3] += high;
    }
    if (p.y_type == ACT_F32) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t row = row0 + g + i / 2 * 8, token = token0 + 2 * c + i % 2;
            if (row < part.n && token < p.m) static_cast<float*>(part.y)[static_cast<size_t>(token) * part.y_stride + row] = v[i];
        }
        return;
    }
    const uint32_t token = token0 + g;
    const bool in_pairs = ((part.y_stride | part.n) & 1) == 0 && (reinterpret_cast<uintptr_t>(part.y) & 3) == 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const uint32_t features = transpose8x8(Bf16::pack(v[2 * h], v[2 * h + 1])), row = row0 + h * 8 + 2 * c;
        if (token >= p.m || row >= part.n) continue;
        uint16_t* to = static_cast<uint16_t*>(part.y) + static_cast<size_t>(token) * part.y_stride + row;
        if (in_pairs) {
            *reinterpret_cast<uint32_t*>(to) = features;
        } else {
            to[0] = static_cast<uint16_t>(features);
            if (row + 1 < part.n) to[1] = static_cast<uint16_t>(features >> 16);
        }
    }
}

/// The feeding thread. Stages follow panels of two slabs (gated: of the gate and up), then the next two.
template <int COLUMNS, int STAGES, int X_SLOTS, int RANKS, bool GATED>
__device__ __forceinline__ void feed(MidShared<COLUMNS, STAGES, X_SLOTS, RANKS>& sh, const LinearMidParams& p, const Range<RANKS>& range, bool keeps_x) {
    if (range.panel == range.panel_end) return;
    constexpr uint32_t STEP = GATED ? 1 : 2;
    struct Place {
        uint32_t slab, panel;
    };
    auto next = [&](Place& at) {
        if (++at.panel == range.panel_end) at.panel = range.panel, at.slab += STEP;
    };
    auto bring_weights = [&](int stage, Place at) {
        const uint32_t slabs = GATED ? 2 : min(2, range.slab_end - at.slab);
        barrier_expect(&sh.full[stage], slabs * SLAB_BYTES + (keeps_x ? 0 : COLUMNS * 128));
        for (uint32_t i = 0; i < slabs; ++i) {
            uint32_t slab = GATED ? at.slab : at.slab + i;
            const uint32_t part = part_of<GATED>(p, slab);
            copy_box_once(sh.w[stage][i], &p.w_map[GATED ? i : part], at.panel * 64, slab * 64, &sh.full[stage]);
        }
    };
    auto bring_x = [&](int slot, uint32_t panel, uint64_t* bar) { copy_box(sh.x[slot], &p.x_map, panel * 64, 0, bar); };

    Place ahead = {range.slab, range.panel};
    int filled = 0;
#pragma unroll 1
    for (; ahead.slab < range.slab_end && filled < STAGES; next(ahead), ++filled) bring_weights(filled, ahead);
    wait_for_previous_kernel();
    if (keeps_x) {
#pragma unroll 1
        for (uint32_t panel = range.panel; panel < range.panel_end; ++panel) {
            const int slot = panel - range.panel;
            barrier_expect(&sh.x_full[slot], COLUMNS * 128);
            bring_x(slot, panel, &sh.x_full[slot]);
        }
    } else {
        Place at = {range.slab, range.panel};
#pragma unroll 1
        for (int stage = 0; stage < filled; ++stage, next(at)) bring_x(stage, at.panel, &sh.full[stage]);
    }
    int stage = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (; ahead.slab < range.slab_end; next(ahead)) {
        barrier_wait(&sh.empty[stage], parity);
        bring_weights(stage, ahead);
        if (!keeps_x) bring_x(stage, ahead.panel, &sh.full[stage]);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}

/// The sum of what all ranks sent, in the order of C.
template <int RANKS, int FRAGMENTS> __device__ __forceinline__ float4 sum_of_all(const float4 (&sent)[RANKS][FRAGMENTS][32], int fragment) {
    float4 sum = sent[0][fragment][threadIdx.x % 32];
#pragma unroll
    for (int i = 1; i < RANKS; ++i) {
        const float4 more = sent[i][fragment][threadIdx.x % 32];
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    return sum;
}

__device__ __forceinline__ float4 gated(const LinearMidParams& p, float4 gate, float4 up) {
    return make_float4(gate_activation(gate.x, p.activation) * up.x, gate_activation(gate.y, p.activation) * up.y,
                       gate_activation(gate.z, p.activation) * up.z, gate_activation(gate.w, p.activation) * up.w);
}

/// Adds up and stores this thread block's rows of the slabs from `slab` on.
template <int COLUMNS, int STAGES, int X_SLOTS, int RANKS, bool GATED>
__device__ __forceinline__ void finish(MidShared<COLUMNS, STAGES, X_SLOTS, RANKS>& sh, const LinearMidParams& p, uint32_t slab, uint32_t slabs, uint32_t rank) {
    // Fragments by 16 rows, then 8 columns.
    constexpr uint32_t BY_COLUMNS = COLUMNS / 8, FRAGMENTS = 4 / RANKS * BY_COLUMNS;
#pragma unroll 1
    for (uint32_t i = threadIdx.x / 32; i < (GATED ? 1 : slabs) * FRAGMENTS; i += MULTIPLIERS / 32) {
        const uint32_t nth = i / FRAGMENTS, fragment = i % FRAGMENTS;
        uint32_t in_part = slab + nth;
        const LinearMidPart part = p.parts[part_of<GATED>(p, in_part)];
        float4 sum = sum_of_all(sh.sums[nth], fragment);
        if constexpr (GATED) sum = gated(p, sum, sum_of_all(sh.sums[1], fragment));
        store_fragment(p, part, in_part * 64 + (rank * (4 / RANKS) + fragment / BY_COLUMNS) * 16, fragment % BY_COLUMNS * 8, sum);
    }
}

/// A multiplying warpgroup: one of two slabs at a time.
template <class T, int COLUMNS, int STAGES, int X_SLOTS, int RANKS, bool GATED>
__device__ __forceinline__ void multiply(MidShared<COLUMNS, STAGES, X_SLOTS, RANKS>& sh, const LinearMidParams& p, const Range<RANKS>& range, bool keeps_x) {
    constexpr int BY_COLUMNS = COLUMNS / 8;
    constexpr uint32_t STEP = GATED ? 1 : 2;
    const uint32_t warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    // A warp has 16 rows of a slab; a rank owns as many warps' rows as there are to a rank.
    const uint32_t owner = warp / (4 / RANKS), first_fragment = warp % (4 / RANKS) * BY_COLUMNS;
    const uint32_t sums_there = address_at(&sh.sums[warpgroup][range.rank][first_fragment][lane], owner);
    const uint32_t sums_full_there = address_at(&sh.sums_full, owner);
    int stage = 0;
    uint32_t parity = 0, sums_parity = 0;
    for (uint32_t slab = range.slab; slab < range.slab_end; slab += STEP) {
        const uint32_t slabs = GATED ? 2 : min(2, range.slab_end - slab);
        const bool is_first = slab == range.slab, is_last = slab + STEP >= range.slab_end;
        const bool has_slab = warpgroup < slabs;
        float d[COLUMNS / 2] = {};
#pragma unroll 1
        for (uint32_t panel = range.panel; panel < range.panel_end; ++panel) {
            const int slot = keeps_x ? panel - range.panel : stage;
            barrier_wait(&sh.full[stage], parity);
            if (keeps_x && is_first) barrier_wait(&sh.x_full[slot], 0);
            if (has_slab) {
                const uint32_t w = shared_address(sh.w[stage][warpgroup]), x = shared_address(sh.x[slot]);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; ++k) wgmma_ss<T, COLUMNS>(d, k_major_descriptor(w + k * 32), k_major_descriptor(x + k * 32), 1);
                wgmma_commit();
                // At once, and not when the next stage has come: it is memory that the stage is wanted for.
                wgmma_wait<0>();
            }
            if (lane == 0) barrier_arrive(&sh.empty[stage]);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        wgmma_pin(d);
        if (is_first) await_cluster();
        else barrier_wait_for_cluster(&sh.sums_empty, sums_parity ^ 1);
        if (threadIdx.x == 0) barrier_expect(&sh.sums_full, slabs * sizeof(sh.sums[0]));
        if (has_slab) {
#pragma unroll
            for (int f = 0; f < BY_COLUMNS; ++f)
                send16(sums_there + f * sizeof(sh.sums[0][0][0]), make_float4(d[f * 4], d[f * 4 + 1], d[f * 4 + 2], d[f * 4 + 3]), sums_full_there);
        }
        barrier_wait_for_cluster(&sh.sums_full, sums_parity);
        finish<COLUMNS, STAGES, X_SLOTS, RANKS, GATED>(sh, p, slab, slabs, range.rank);
        __syncwarp();
        // Behind the last, the others may be gone.
        if (!is_last && lane < RANKS) barrier_arrive_at(address_at(&sh.sums_empty, lane));
        sums_parity ^= 1;
    }
}

template <class T, int COLUMNS, int STAGES, int X_SLOTS, int RANKS, bool GATED> __device__ __forceinline__ void linear_mid(const LinearMidParams& p) {
    static_assert(STAGES <= X_SLOTS, "a stage has a slot of x");
    extern __shared__ unsigned char shared_bytes[];
    auto& sh = *reinterpret_cast<MidShared<COLUMNS, STAGES, X_SLOTS, RANKS>*>((reinterpret_cast<uintptr_t>(shared_bytes) + 1023) & ~uintptr_t(1023));
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier_init(&sh.full[i], 1), barrier_init(&sh.empty[i], MULTIPLIERS / 32);
        for (int i = 0; i < X_SLOTS; ++i) barrier_init(&sh.x_full[i], 1);
        barrier_init(&sh.sums_full, 1), barrier_init(&sh.sums_empty, RANKS * MULTIPLIERS / 32);
    }
    __syncwarp();
    announce_to_cluster();
    __syncthreads();
    const Range<RANKS> range(p);
    const bool keeps_x = range.panel_end - range.panel <= X_SLOTS;
    if (threadIdx.x < MULTIPLIERS) {
        wait_for_previous_kernel();
        release_next_kernel();
        multiply<T, COLUMNS, STAGES, X_SLOTS, RANKS, GATED>(sh, p, range, keeps_x);
    } else {
        if (threadIdx.x == MULTIPLIERS) feed<COLUMNS, STAGES, X_SLOTS, RANKS, GATED>(sh, p, range, keeps_x);
        __syncwarp();
        await_cluster();
    }
}

#else

template <class T, int COLUMNS, int STAGES, int X_SLOTS, int RANKS, bool GATED> __device__ __forceinline__ void linear_mid(const LinearMidParams&) {}

#endif

} // namespace pagemill

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define MID_CLUSTER(RANKS) __cluster_dims__(RANKS, 1, 1)
#else
#define MID_CLUSTER(RANKS)
#endif
#define LINEAR_MID_KERNEL(name, T, COLUMNS, STAGES, X_SLOTS, RANKS, GATED)                                          \
    extern "C" __global__ void __launch_bounds__(pagemill::MID_THREADS, 1) MID_CLUSTER(RANKS)                       \
        linear_mid_##name(const __grid_constant__ pagemill::LinearMidParams p) {                                    \
        pagemill::linear_mid<pagemill::T, COLUMNS, STAGES, X_SLOTS, RANKS, GATED>(p);                               \
    }

#ifdef LINEAR_TUNE
#define V(COLUMNS, STAGES, X_SLOTS, RANKS)                                                                          \
    LINEAR_MID_KERNEL(m##COLUMNS##_s##STAGES##_x##X_SLOTS##_r##RANKS, Bf16, COLUMNS, STAGES, X_SLOTS, RANKS, false) \
    LINEAR_MID_KERNEL(gated_m##COLUMNS##_s##STAGES##_x##X_SLOTS##_r##RANKS, Bf16, COLUMNS, STAGES, X_SLOTS, RANKS, true)
#include "bench/linear_mid_variants.inc"
#else
// `FORMS` in src/kernels/linear_mid.rs (measured best, NOTES.md).
#define LINEAR_MID_FORM(name, T, COLUMNS, STAGES, X_SLOTS)                                                          \
    LINEAR_MID_KERNEL(name##_m##COLUMNS, T, COLUMNS, STAGES, X_SLOTS, 2, false)                                     \
    LINEAR_MID_KERNEL(gated_##name##_m##COLUMNS, T, COLUMNS, STAGES, X_SLOTS, 2, true)
#define LINEAR_MID_KERNELS(name, T)                                                                                 \
    LINEAR_MID_FORM(name, T, 16, 9, 32)                                                                             \
    LINEAR_MID_FORM(name, T, 32, 8, 16)                                                                             \
    LINEAR_MID_FORM(name, T, 64, 7, 7)                                                                              \
    LINEAR_MID_FORM(name, T, 128, 5, 5)
LINEAR_MID_KERNELS(bf16, Bf16)
LINEAR_MID_KERNELS(f16, F16)
#endif
