// y [M, N] = x [M, C] · W [N, C]^T for M up to 128 on Hopper: reads every weight once, near memory bandwidth, and
// multiplies on the tensor cores by whole warpgroups. Decides how a thread block brings weights and x and in which order
// sums are added; the host (`src/kernels/linear_mid.rs`) picks the form and the cut. Knows no layer.
//
// Letters: M tokens, N output features, C input features. The product is taken as y^T = W x^T: W is the A operand,
// so that its many rows fill the tensor cores whatever M is, and x the B operand, one column a token. A panel is 64
// elements of C (one swizzled row of shared memory), a tile 64 rows of W (one product's height).
//
// A thread block has a share: a run of rows of one part, as many as share the rows out evenly, whatever multiple of a
// tile that is. Boxes of the copy engine begin at any row; tiles of a share overlap where it ends, and a row is stored
// by the first that has it. A share with more rows than a form has tiles for is taken in passes. x costs L2 as many
// bytes as a share has fewer rows than there are tokens: thread blocks of a cluster have different rows and the same
// range of C, and each brings its part of x to all of them.
//
// C is one range, or cut into several (planes), whose sums are stored apart: whoever reads y adds them in order. A row's
// bits depend on its token, the weight and the cut of C only: not on M, the form, the shares, nor on what else is in
// the launch.
//
// Two warps feed, through rings of their own: weights, which wait for nothing but room, since they do not depend on the
// previous kernel; and x. One or two warpgroups multiply, each one or two tiles at once. The gated form has the gate's
// tile and up's in one warpgroup, so that both sums of an output are in one register. Up to three products of one x
// (q, k, v) share a launch.
#include "cluster_barriers.cuh"
#include "warpgroup_narrow.cuh"

namespace pagemill {

constexpr int MID_PARTS = 3;
constexpr int PANEL_BYTES = 128; // of a row
constexpr int CUT_PANELS = 4;    // C is cut at multiples of so many
constexpr int MAX_SLOTS = 16;    // of a ring
constexpr int FEEDERS = 64;      // threads: a warp for weights, a warp for x

/// One product of x.
struct LinearMidPart {
    const float* bias; // [N] or null
    void* y;           // [planes, M, y_stride] elements of y_type
    uint32_t n;
    uint32_t y_stride;
    uint32_t num_shares; // of its rows; behind the last part 0
    uint32_t box_rows;   // of its map: the rows of the largest pass
};

struct LinearMidParams {
    CUtensorMap x_map;              // [M, C], boxes of 64 columns and the form's columns of tokens by thread blocks of a cluster
    CUtensorMap w_map[MID_PARTS];   // [N, C], boxes of 64 columns and the part's box_rows; gated: gate, up
    LinearMidPart parts[MID_PARTS]; // gated: the first only, without bias
    uint64_t plane_stride;          // bytes of y from plane to plane
    uint32_t m;                     // 1 ..= the form's columns
    uint32_t num_shares;            // of all parts, and of none: a multiple of the cluster's thread blocks
    uint32_t num_passes;            // of a share
    uint32_t num_planes;            // ranges of C
    uint32_t num_panels;            // of C
    uint32_t tile_rows;             // rows that a panel of weights has room for: a multiple of 8; gated: of each of both
    uint32_t w_slots;               // 2 ..= MAX_SLOTS
    uint32_t x_slots;
    uint32_t y_type;                // ActivationType: F32 or BF16
    uint32_t activation;            // GateActivation
};
static_assert(sizeof(LinearMidPart) == 32 && sizeof(LinearMidParams) == 768, "src/kernels/linear_mid.rs has the same");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

/// How a kernel is compiled: warpgroups that multiply, the tiles of each, and thread blocks that share x.
template <class ELEMENT, int COLUMNS_, int WARPGROUPS_, int TILES_, int PANELS_, int CLUSTER_, int PENDING_, bool GATED_> struct MidForm {
    using T = ELEMENT;
    static constexpr int COLUMNS = COLUMNS_, WARPGROUPS = WARPGROUPS_, TILES = TILES_, PANELS = PANELS_, CLUSTER = CLUSTER_, PENDING = PENDING_;
    static constexpr bool GATED = GATED_;
    static constexpr int X_BYTES = COLUMNS * PANEL_BYTES; // of a panel, of which a stage has PANELS
    static constexpr int BOXES = GATED ? 2 : 1;           // of weights, a panel
    static_assert(CUT_PANELS % PANELS == 0, "no stage lies across a cut");
    static_assert(!GATED || TILES == 2, "a tile of the gate and one of up");
    static_assert(COLUMNS / CLUSTER >= 8, "a box of x begins at a multiple of 8 rows");
};

struct MidBarriers {
    uint64_t w_full[MAX_SLOTS], w_empty[MAX_SLOTS], x_full[MAX_SLOTS], x_empty[MAX_SLOTS];
};

/// A ring's place: which slot, and the parity of its turn.
struct RingPlace {
    uint32_t slot = 0, parity = 0;
    __device__ __forceinline__ void advance(uint32_t slots) {
        if (++slot == slots) slot = 0, parity ^= 1;
    }
};

/// What a thread block works on: a share of a part's rows, panels [panel, panel_end) of C.
struct MidWork {
    uint32_t part, share, plane, panel, panel_end;
    /// C is cut where every form's stages end. Panels behind C are zeros.
    template <class F> __device__ __forceinline__ static MidWork of(const LinearMidParams& p) {
        MidWork work = {0, blockIdx.x % p.num_shares, blockIdx.x / p.num_shares, 0, 0};
        const uint32_t cuts = (p.num_panels + CUT_PANELS - 1) / CUT_PANELS, whole = (p.num_panels + F::PANELS - 1) / F::PANELS * F::PANELS;
        work.panel = min(work.plane * cuts / p.num_planes * CUT_PANELS, whole);
        work.panel_end = min((work.plane + 1) * cuts / p.num_planes * CUT_PANELS, whole);
#pragma unroll
        for (uint32_t i = 0; i + 1 < MID_PARTS; ++i)
            if (work.part == i && work.share >= p.parts[i].num_shares && p.parts[i + 1].num_shares > 0) work.share -= p.parts[i].num_shares, ++work.part;
        return work;
    }
    /// The first row of a pass, even; behind the last pass, and behind the last share, N.
    __device__ __forceinline__ uint32_t first_row(const LinearMidParams& p, uint32_t pass) const {
        const uint32_t n = p.parts[part].n, runs = p.parts[part].num_shares * p.num_passes;
        const uint32_t run = min(share * p.num_passes + pass, runs);
        return min(n, 2 * static_cast<uint32_t>(uint64_t((n + 1) / 2) * run / runs));
    }
};

/// Makes this thread's new barriers known to the copy engine.
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/// As `copy_box`, of what is read once.
__device__ __forceinline__ void copy_box_once(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t bar, uint64_t once) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(bar), "l"(once) : "memory");
}
/// The cache policy of what is read once: the first to leave L2.
__device__ __forceinline__ uint64_t read_once_policy() {
    uint64_t once;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    return once;
}
/// As `copy_box`, told addresses.
__device__ __forceinline__ void copy_box_at(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(bar) : "memory");
}
/// As `copy_box`, to the same place of every thread block in `ranks`, whose barriers at that place count the bytes.
__device__ __forceinline__ void copy_box_to_all(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t bar, uint16_t ranks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(bar), "h"(ranks) : "memory");
}

/// Brings a share's weights, pass by pass. One thread.
template <class F> __device__ __forceinline__ void feed_weights(const LinearMidParams& p, const MidWork& work, MidBarriers& bars, uint32_t ring) {
    const uint32_t panel_bytes = F::BOXES * p.tile_rows * PANEL_BYTES, box_bytes = F::BOXES * p.parts[work.part].box_rows * PANEL_BYTES;
    const uint64_t once = read_once_policy();
    const CUtensorMap* map = &p.w_map[work.part];
    RingPlace at;
    for (uint32_t pass = 0; pass < p.num_passes; ++pass) {
        const uint32_t row = work.first_row(p, pass);
#pragma unroll 1
        for (uint32_t panel = work.panel; panel < work.panel_end; panel += F::PANELS, at.advance(p.w_slots)) {
            const uint32_t full = shared_address(&bars.w_full[at.slot]);
            uint32_t to = ring + at.slot * F::PANELS * panel_bytes;
            barrier_wait(&bars.w_empty[at.slot], at.parity ^ 1);
            barrier_expect(&bars.w_full[at.slot], F::PANELS * box_bytes);
#pragma unroll
            for (uint32_t i = panel; i < panel + F::PANELS; ++i, to += panel_bytes) {
                copy_box_once(to, map, i * 64, row, full, once);
                if constexpr (F::GATED) copy_box_once(to + p.tile_rows * PANEL_BYTES, map + 1, i * 64, row, full, once);
            }
        }
    }
}

/// Brings x, or this thread block's part of it to all of the cluster, once a pass. One thread.
template <class F> __device__ __forceinline__ void feed_x(const LinearMidParams& p, const MidWork& work, MidBarriers& bars, uint32_t ring) {
    constexpr uint32_t TOKENS = F::COLUMNS / F::CLUSTER;
    const uint32_t first_token = F::CLUSTER == 1 ? 0 : blockIdx.x % F::CLUSTER * TOKENS;
    RingPlace at;
    for (uint32_t pass = 0; pass < p.num_passes; ++pass) {
#pragma unroll 1
        for (uint32_t panel = work.panel; panel < work.panel_end; panel += F::PANELS, at.advance(p.x_slots)) {
            const uint32_t full = shared_address(&bars.x_full[at.slot]);
            uint32_t to = ring + at.slot * F::PANELS * F::X_BYTES + first_token * PANEL_BYTES;
            barrier_wait(&bars.x_empty[at.slot], at.parity ^ 1);
            barrier_expect(&bars.x_full[at.slot], F::PANELS * F::X_BYTES);
#pragma unroll
            for (uint32_t i = panel; i < panel + F::PANELS; ++i, to += F::X_BYTES) {
                if constexpr (F::CLUSTER == 1) copy_box_at(to, &p.x_map, i * 64, 0, full);
                else copy_box_to_all(to, &p.x_map, i * 64, first_token, full, (1 << F::CLUSTER) - 1);
            }
        }
    }
}

/// Features of a tile: the one that its first row is, and those stored from it, [low, high).
struct MidRows {
    uint32_t first, low, high;
};

/// Sums of 16 features from `row0` of y and 8 tokens from `token0`, held as a C fragment, to their place.
__device__ __forceinline__ void store_fragment(const LinearMidParams& p, const LinearMidPart& part, void* y, const float* bias, const MidRows& rows, uint32_t row0,
                                               uint32_t token0, float4 sums) {
    const uint32_t g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    float v[4] = {sums.x, sums.y, sums.z, sums.w};
    auto is_stored = [&](uint32_t row) { return row >= rows.low && row < rows.high; };
    if (bias != nullptr) {
        const float low = is_stored(row0 + g) ? bias[row0 + g] : 0.0f, high = is_stored(row0 + 8 + g) ? bias[row0 + 8 + g] : 0.0f;
        v[0] += low, v[1] += low, v[2] += high, v[3] += high;
    }
    if (p.y_type == ACT_F32) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t row = row0 + g + i / 2 * 8, token = token0 + 2 * c + i % 2;
            if (is_stored(row) && token < p.m) static_cast<float*>(y)[static_cast<size_t>(token) * part.y_stride + row] = v[i];
        }
        return;
    }
    // Rows begin even: a pair is stored as one or, at the end of an odd N, by halves.
    const uint32_t token = token0 + g;
    const bool in_pairs = ((part.y_stride | rows.high) & 1) == 0 && (reinterpret_cast<uintptr_t>(y) & 3) == 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const uint32_t features = transpose8x8(Bf16::pack(v[2 * h], v[2 * h + 1])), row = row0 + h * 8 + 2 * c;
        if (token >= p.m || !is_stored(row)) continue;
        uint16_t* to = static_cast<uint16_t*>(y) + static_cast<size_t>(token) * part.y_stride + row;
        if (in_pairs) {
            *reinterpret_cast<uint32_t*>(to) = features;
        } else {
            to[0] = static_cast<uint16_t>(features);
            if (row + 1 < rows.high) to[1] = static_cast<uint16_t>(features >> 16);
        }
    }
}

/// A tile's sums, `more` those of up in the gated form.
template <class F> __device__ __forceinline__ void store_tile(const LinearMidParams& p, const MidWork& work, const MidRows& rows, const float (&d)[F::COLUMNS / 2],
                                                              const float (&more)[F::COLUMNS / 2]) {
    const LinearMidPart& part = p.parts[work.part];
    void* y = static_cast<char*>(part.y) + work.plane * p.plane_stride;
    const float* bias = work.plane == 0 ? part.bias : nullptr;
    const uint32_t row0 = rows.first + threadIdx.x / 32 % 4 * 16;
#pragma unroll
    for (int f = 0; f < F::COLUMNS / 8; ++f) {
        float4 sums = make_float4(d[f * 4], d[f * 4 + 1], d[f * 4 + 2], d[f * 4 + 3]);
        if constexpr (F::GATED) {
            sums.x = gate_activation(sums.x, p.activation) * more[f * 4], sums.y = gate_activation(sums.y, p.activation) * more[f * 4 + 1];
            sums.z = gate_activation(sums.z, p.activation) * more[f * 4 + 2], sums.w = gate_activation(sums.w, p.activation) * more[f * 4 + 3];
        }
        store_fragment(p, part, y, bias, rows, row0, f * 8, sums);
    }
}

/// A multiplying warpgroup.
template <class F> __device__ __forceinline__ void multiply(const LinearMidParams& p, const MidWork& work, MidBarriers& bars, uint32_t w_ring, uint32_t x_ring) {
    const uint32_t warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
    const uint32_t panel_bytes = F::BOXES * p.tile_rows * PANEL_BYTES;
    // Tiles lie at multiples of 64 rows as long as they fit; the last ends where the room for rows does.
    const uint32_t last_tile = p.tile_rows < 64 ? 0 : p.tile_rows - 64;
    auto tile_row = [&](int tile) { return min((F::GATED ? warpgroup : warpgroup * F::TILES + tile) * 64, last_tile); };
    uint64_t w_first[F::TILES];
#pragma unroll
    for (int t = 0; t < F::TILES; ++t) w_first[t] = k_major_descriptor(w_ring + (tile_row(t) + (F::GATED ? t * p.tile_rows : 0)) * PANEL_BYTES);
    const uint64_t x_first = k_major_descriptor(x_ring);
    const uint32_t stages = (work.panel_end - work.panel) / F::PANELS * p.num_passes;
    // Where this lane says that x has been read: behind the last turn of a slot nobody waits for it, and may be gone.
    const uint32_t x_empty = F::CLUSTER == 1 ? 0 : address_at(bars.x_empty, lane % F::CLUSTER);
    const uint32_t told = stages > p.x_slots ? stages - p.x_slots : 0;

    RingPlace w, x, w_read, x_read;
    uint32_t stages_read = 0;
    auto give_back = [&] {
        if (lane == 0) barrier_arrive(&bars.w_empty[w_read.slot]);
        if (lane < F::CLUSTER && stages_read < told) {
            if constexpr (F::CLUSTER == 1) barrier_arrive(&bars.x_empty[x_read.slot]);
            else barrier_arrive_at(x_empty + x_read.slot * 8);
        }
        w_read.advance(p.w_slots), x_read.advance(p.x_slots), ++stages_read;
    };
    for (uint32_t pass = 0; pass < p.num_passes; ++pass) {
        float d[F::TILES][F::COLUMNS / 2] = {};
#pragma unroll 1
        for (uint32_t panel = work.panel; panel < work.panel_end; panel += F::PANELS) {
            const uint32_t w_offset = w.slot * F::PANELS * panel_bytes >> 4, x_offset = x.slot * F::PANELS * F::X_BYTES >> 4;
            barrier_wait(&bars.w_full[w.slot], w.parity);
            barrier_wait(&bars.x_full[x.slot], x.parity);
            wgmma_fence();
#pragma unroll
            for (uint32_t i = 0; i < F::PANELS; ++i) {
                const uint32_t w_at = w_offset + i * (panel_bytes >> 4), x_at = x_offset + i * (F::X_BYTES >> 4);
#pragma unroll
                for (int k = 0; k < 4; ++k)
#pragma unroll
                    for (int t = 0; t < F::TILES; ++t) wgmma_ss<typename F::T, F::COLUMNS>(d[t], w_first[t] + (w_at + k * 2), x_first + (x_at + k * 2), 1);
            }
            wgmma_commit();
            wgmma_wait<F::PENDING>();
            if (F::PENDING == 0 || panel != work.panel) give_back();
            w.advance(p.w_slots), x.advance(p.x_slots);
        }
        if constexpr (F::PENDING > 0) {
            wgmma_wait<0>();
            if (work.panel != work.panel_end) give_back();
        }
        const uint32_t row = work.first_row(p, pass), row_end = work.first_row(p, pass + 1);
#pragma unroll
        for (int t = 0; t < F::TILES; ++t) wgmma_pin(d[t]);
#pragma unroll
        for (int t = 0; t < (F::GATED ? 1 : F::TILES); ++t) {
            const uint32_t tile = F::GATED ? warpgroup : warpgroup * F::TILES + t;
            const MidRows rows = {row + tile_row(t), min(row + tile * 64, row_end), min(row + tile * 64 + 64, row_end)};
            if (rows.low < rows.high) store_tile<F>(p, work, rows, d[t], d[F::TILES - 1]);
        }
    }
}

template <class F> __device__ __forceinline__ void linear_mid(const LinearMidParams& p) {
    extern __shared__ unsigned char shared_bytes[];
    __shared__ MidBarriers bars;
    const uint32_t w_ring = (shared_address(shared_bytes) + 1023) & ~1023u;
    const uint32_t x_ring = w_ring + p.w_slots * F::PANELS * F::BOXES * p.tile_rows * PANEL_BYTES;
    constexpr uint32_t MULTIPLIERS = F::WARPGROUPS * 128;
    if (threadIdx.x == 0) {
        for (int i = 0; i < MAX_SLOTS; ++i) {
            barrier_init(&bars.w_full[i], 1), barrier_init(&bars.w_empty[i], MULTIPLIERS / 32);
            barrier_init(&bars.x_full[i], 1), barrier_init(&bars.x_empty[i], F::CLUSTER * MULTIPLIERS / 32);
        }
    }
    __syncwarp();
    if constexpr (F::CLUSTER > 1) announce_to_cluster();
    else fence_barrier_init();
    __syncthreads();
    const MidWork work = MidWork::of<F>(p);
    if (threadIdx.x < MULTIPLIERS) {
        if constexpr (F::CLUSTER > 1) await_cluster();
        wait_for_previous_kernel();
        release_next_kernel();
        multiply<F>(p, work, bars, w_ring, x_ring);
    } else if (threadIdx.x < MULTIPLIERS + 32) {
        if (threadIdx.x == MULTIPLIERS) feed_weights<F>(p, work, bars, w_ring);
        __syncwarp();
        if constexpr (F::CLUSTER > 1) await_cluster();
    } else {
        if constexpr (F::CLUSTER > 1) await_cluster();
        wait_for_previous_kernel();
        if (threadIdx.x == MULTIPLIERS + 32) feed_x<F>(p, work, bars, x_ring);
    }
}

#else

template <class ELEMENT, int COLUMNS, int WARPGROUPS, int TILES, int PANELS, int CLUSTER, int PENDING, bool GATED> struct MidForm {};
template <class F> __device__ __forceinline__ void linear_mid(const LinearMidParams&) {}

#endif

} // namespace pagemill

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define MID_CLUSTER(CLUSTER) __cluster_dims__(CLUSTER, 1, 1)
#else
#define MID_CLUSTER(CLUSTER)
#endif
#define LINEAR_MID_KERNEL(name, T, COLUMNS, WARPGROUPS, TILES, PANELS, CLUSTER, PENDING, GATED)                                           \
    extern "C" __global__ void __launch_bounds__(WARPGROUPS * 128 + pagemill::FEEDERS, 1) MID_CLUSTER(CLUSTER)           \
        linear_mid_##name(const __grid_constant__ pagemill::LinearMidParams p) {                                         \
        pagemill::linear_mid<pagemill::MidForm<pagemill::T, COLUMNS, WARPGROUPS, TILES, PANELS, CLUSTER, PENDING, GATED>>(p);             \
    }

#ifdef LINEAR_TUNE
#define V(COLUMNS, WARPGROUPS, TILES, PANELS, CLUSTER, PENDING, GATED)                                                                    \
    LINEAR_MID_KERNEL(m##COLUMNS##_w##WARPGROUPS##_t##TILES##_p##PANELS##_c##CLUSTER##_d##PENDING##_g##GATED, Bf16, COLUMNS, WARPGROUPS, TILES, PANELS, CLUSTER, PENDING, GATED)
#include "bench/linear_mid_variants.inc"
#else
#endif
