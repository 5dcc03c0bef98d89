// y [M, N] = x [M, C] · W [N, C]^T for M up to 256 on Hopper: reads every weight once, near memory bandwidth, and
// multiplies on the tensor cores by whole warpgroups. Decides how a thread block brings weights and in which order
// sums are added; how the work is cut is the host's (`src/kernels/linear_mid.rs`). Knows no layer.
//
// Letters: M tokens, N output features, C input features. The product is taken as y^T = W x^T: W is the A operand,
// so that its many rows fill the tensor cores whatever M is, and x the B operand, one column a token. A panel is 64
// elements of C (one swizzled row of shared memory); a slab 64 rows of W (one product's height).
//
// A tile is the four slabs of a pair of thread blocks, two each: 256 rows of W, or 128 of the gate and the same 128 of
// up (both sums of an output then meet in one thread). All panels of all tiles, one after the other, are cut into equal
// ranges, one a pair, wherever that falls: every multiprocessor has the same to read. Where a tile is cut, its thread
// blocks leave partial sums in memory; when all have, each adds a share of them up, in the order of C. The cut depends on
// the shapes of the weights and on the chip, never on M, and so do a row's bits: a token has the same sums in any
// company, and the same for every number of columns compiled.
//
// One warp feeds: boxes of W and x through a ring of stages. The first stages' weights are asked for before waiting for
// the previous kernel, since weights do not depend on it. Two warpgroups multiply, each both slabs by half of the
// tokens. Where x weighs as much as the weights in L2, the pair are a cluster and each brings half of x for both.
#include "pair.cuh"
#include "warpgroup_narrow.cuh"

namespace pagemill {

constexpr int MID_PARTS = 3;
constexpr int SLAB_BYTES = 64 * 128;  // 64 rows of a panel
constexpr int MULTIPLIERS = 256;      // threads of the two warpgroups that multiply
constexpr int MID_THREADS = MULTIPLIERS + 32;

/// One product of x.
struct LinearMidPart {
    const float* bias; // [N] or null
    void* y;           // [M, y_stride] elements of y_type
    uint32_t n;
    uint32_t y_stride;
};

struct LinearMidParams {
    CUtensorMap x_map;            // [M, C], boxes of 64 columns and as many rows as the variant brings at once
    CUtensorMap w_map[MID_PARTS]; // [N, C], boxes of 64 columns and 64 rows; gated: gate, up
    LinearMidPart parts[MID_PARTS]; // behind the last: n is 0; gated: the first only, without bias
    float4* partial;              // two slots a thread block, see `Slots`
    uint32_t* arrivals;           // one a thread block, 0 between launches
    uint32_t m;                   // 1 ..= columns of the variant
    uint32_t num_tiles;           // of all parts
    uint32_t panels_per_tile;
    uint32_t panels_per_pair;     // both multiples of MID_CUT
    uint32_t y_type;              // ActivationType: F32 or BF16
    uint32_t activation;          // GateActivation
};
constexpr int MID_CUT = 2;
static_assert(sizeof(LinearMidPart) == 24 && sizeof(LinearMidParams) == 640, "src/kernels/linear_mid.rs has the same");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

template <int COLUMNS, int PANELS, int STAGES> struct MidShared {
    alignas(1024) unsigned char w[STAGES][PANELS][2 * SLAB_BYTES];
    unsigned char x[STAGES][PANELS][COLUMNS * 128];
    uint64_t full[STAGES], empty[STAGES];
};

/// As `copy_box`, of what is read once: the first to leave the L2 cache.
__device__ __forceinline__ void copy_box_once(void* to, const CUtensorMap* map, int column, int row, uint64_t* bar) {
    asm volatile("{ .reg .b64 once; createpolicy.fractional.L2::evict_first.b64 once, 1.0;"
                 " cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], once; }"
                 ::"r"(shared_address(to)), "l"(map), "r"(column), "r"(row), "r"(shared_address(bar)) : "memory");
}

/// What a pair of thread blocks works on: panels [begin, end) of all tiles one after the other.
struct Range {
    uint32_t begin, end;
    __device__ __forceinline__ explicit Range(const LinearMidParams& p) {
        begin = blockIdx.x / 2 * p.panels_per_pair;
        end = min(begin + p.panels_per_pair, p.num_tiles * p.panels_per_tile);
    }
};

/// The part that `tile` belongs to; `tile` becomes its number there.
template <bool GATED> __device__ __forceinline__ uint32_t part_of(const LinearMidParams& p, uint32_t& tile) {
    if constexpr (!GATED) {
#pragma unroll
        for (uint32_t i = 0; i + 1 < MID_PARTS; ++i) {
            const uint32_t tiles = (p.parts[i].n + 255) / 256;
            if (tile < tiles) return i;
            tile -= tiles;
        }
        return MID_PARTS - 1;
    }
    return 0;
}

/// A tile that several pairs share, as one of its thread blocks sees it.
struct SharedTile {
    uint32_t first_pair, pieces, own;
    __device__ __forceinline__ SharedTile(const LinearMidParams& p, uint32_t tile) {
        first_pair = tile * p.panels_per_tile / p.panels_per_pair;
        const uint32_t last_pair = ((tile + 1) * p.panels_per_tile - 1) / p.panels_per_pair;
        pieces = last_pair - first_pair + 1, own = blockIdx.x / 2 - first_pair;
    }
    /// A thread block's first slot has the end of a tile (or a middle), its second the beginning of one.
    __device__ __forceinline__ uint32_t slot(uint32_t piece) const {
        return ((first_pair + piece) * 2 + blockIdx.x % 2) * 2 + (piece == 0);
    }
    __device__ __forceinline__ uint32_t* arrivals(const LinearMidParams& p) const { return p.arrivals + first_pair * 2 + blockIdx.x % 2; }
};

__device__ __forceinline__ void sync_multipliers() { named_sync(1, MULTIPLIERS); }

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

__device__ __forceinline__ float4 gated(const LinearMidParams& p, float4 gate, float4 up) {
    return make_float4(gate_activation(gate.x, p.activation) * up.x, gate_activation(gate.y, p.activation) * up.y,
                       gate_activation(gate.z, p.activation) * up.z, gate_activation(gate.w, p.activation) * up.w);
}

/// The feeding thread: weights of the whole range, and x beside them.
template <int COLUMNS, int PANELS, int STAGES, bool MULTICAST, bool GATED>
__device__ __forceinline__ void feed(MidShared<COLUMNS, PANELS, STAGES>& sh, const LinearMidParams& p, Range range) {
    const uint32_t rank = blockIdx.x % 2;
    auto bring_weights = [&](int stage, uint32_t at) {
        uint32_t tile = at / p.panels_per_tile;
        const uint32_t panel = at % p.panels_per_tile, part = part_of<GATED>(p, tile);
        const uint32_t row = GATED ? tile * 128 + rank * 64 : tile * 256 + rank * 128;
        barrier_expect(&sh.full[stage], PANELS * (2 * SLAB_BYTES + COLUMNS * 128));
#pragma unroll
        for (int i = 0; i < PANELS; ++i) {
            copy_box_once(sh.w[stage][i], &p.w_map[part], (panel + i) * 64, row, &sh.full[stage]);
            copy_box_once(sh.w[stage][i] + SLAB_BYTES, &p.w_map[GATED ? 1 : part], (panel + i) * 64, GATED ? row : row + 64, &sh.full[stage]);
        }
    };
    auto bring_x = [&](int stage, uint32_t at) {
        const uint32_t panel = at % p.panels_per_tile;
#pragma unroll
        for (int i = 0; i < PANELS; ++i) {
            if constexpr (MULTICAST)
                copy_box_to_pair(sh.x[stage][i] + rank * COLUMNS * 64, &p.x_map, (panel + i) * 64, rank * (COLUMNS / 2), &sh.full[stage]);
            else copy_box(sh.x[stage][i], &p.x_map, (panel + i) * 64, 0, &sh.full[stage]);
        }
    };
    int filled = 0;
    for (uint32_t at = range.begin; at < range.end && filled < STAGES; at += PANELS, ++filled) bring_weights(filled, at);
    wait_for_previous_kernel();
    uint32_t at = range.begin;
    for (int stage = 0; stage < filled; ++stage, at += PANELS) bring_x(stage, at);
    int stage = 0;
    uint32_t parity = 0;
    for (; at < range.end; at += PANELS) {
        barrier_wait(&sh.empty[stage], parity);
        bring_weights(stage, at);
        bring_x(stage, at);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}

/// A thread's sums: of each slab, 64 rows by half of the columns, as C fragments of 8 columns.
template <int COLUMNS> struct Sums {
    static constexpr int FRAGMENTS = COLUMNS / 16;
    float d[2][FRAGMENTS * 4];
    __device__ __forceinline__ float4 fragment(int slab, int f) const {
        return make_float4(d[slab][f * 4], d[slab][f * 4 + 1], d[slab][f * 4 + 2], d[slab][f * 4 + 3]);
    }
};

/// Where a thread's fragments of a tile belong.
template <int COLUMNS, bool GATED> struct Place {
    LinearMidPart part;
    uint32_t row, token;
    __device__ __forceinline__ Place(const LinearMidParams& p, uint32_t tile) {
        const uint32_t warp = threadIdx.x / 32 % 4;
        part = p.parts[part_of<GATED>(p, tile)];
        row = (GATED ? tile * 128 + blockIdx.x % 2 * 64 : tile * 256 + blockIdx.x % 2 * 128) + warp * 16;
        token = threadIdx.x / 128 * (COLUMNS / 2);
    }
};

/// Adds up this thread block's share of a tile that several pairs worked on, once all have left their sums.
template <int COLUMNS, bool GATED> __device__ __forceinline__ void add_up(const LinearMidParams& p, uint32_t tile) {
    constexpr uint32_t FRAGMENTS = Sums<COLUMNS>::FRAGMENTS, SLOT = 2 * FRAGMENTS * MULTIPLIERS, OUTPUTS = GATED ? FRAGMENTS : 2 * FRAGMENTS;
    const SharedTile shared(p, tile);
    const Place<COLUMNS, GATED> place(p, tile);
    uint32_t* arrivals = shared.arrivals(p);
    if (threadIdx.x == 0) {
        uint32_t arrived;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(arrivals) : "memory");
        while (arrived < shared.pieces);
        // Whoever is the last to have seen it leaves zero for the next launch.
        if (atomicAdd(arrivals, 1) == 2 * shared.pieces - 1) atomicExch(arrivals, 0);
    }
    sync_multipliers();
    auto sum = [&](uint32_t fragment) {
        const float4* at = p.partial + fragment * MULTIPLIERS + threadIdx.x;
        float4 total = __ldcg(at + static_cast<size_t>(shared.slot(0)) * SLOT);
#pragma unroll 4
        for (uint32_t piece = 1; piece < shared.pieces; ++piece) {
            const float4 next = __ldcg(at + static_cast<size_t>(shared.slot(piece)) * SLOT);
            total.x += next.x, total.y += next.y, total.z += next.z, total.w += next.w;
        }
        return total;
    };
    const uint32_t begin = shared.own * OUTPUTS / shared.pieces, end = (shared.own + 1) * OUTPUTS / shared.pieces;
#pragma unroll 2
    for (uint32_t i = begin; i < end; ++i) {
        const uint32_t f = i % FRAGMENTS, slab = i / FRAGMENTS;
        const float4 own = sum(i);
        if constexpr (GATED) store_fragment(p, place.part, place.row, place.token + f * 8, gated(p, own, sum(FRAGMENTS + i)));
        else store_fragment(p, place.part, place.row + slab * 64, place.token + f * 8, own);
    }
}

/// A multiplying warpgroup: half of the columns over the whole range.
template <class T, int COLUMNS, int PANELS, int STAGES, bool MULTICAST, bool GATED>
__device__ __forceinline__ void multiply(MidShared<COLUMNS, PANELS, STAGES>& sh, const LinearMidParams& p, Range range) {
    constexpr int HALF = COLUMNS / 2, FRAGMENTS = Sums<COLUMNS>::FRAGMENTS;
    const uint32_t warpgroup = threadIdx.x / 128;
    auto release = [&](int stage) {
        if (threadIdx.x % 32 != 0) return;
        barrier_arrive(&sh.empty[stage]);
        if constexpr (MULTICAST) barrier_arrive_at_peer(&sh.empty[stage], blockIdx.x % 2 ^ 1);
    };
    int stage = 0;
    uint32_t parity = 0;
    for (uint32_t at = range.begin; at < range.end;) {
        const uint32_t tile = at / p.panels_per_tile, tile_end = (tile + 1) * p.panels_per_tile;
        const uint32_t end = min(range.end, tile_end), first = at;
        Sums<COLUMNS> sums;
        int before = -1;
        for (; at < end; at += PANELS) {
            barrier_wait(&sh.full[stage], parity);
            wgmma_fence();
            const uint32_t w = shared_address(sh.w[stage]), x = shared_address(sh.x[stage]) + warpgroup * HALF * 128;
#pragma unroll
            for (int k = 0; k < PANELS * 4; ++k) {
                const uint32_t inside = k % 4 * 32, w_at = w + k / 4 * 2 * SLAB_BYTES + inside;
                const uint64_t columns = k_major_descriptor(x + k / 4 * COLUMNS * 128 + inside);
                const int accumulate = k > 0 || at > first;
                wgmma_ss<T, HALF>(sums.d[0], k_major_descriptor(w_at), columns, accumulate);
                wgmma_ss<T, HALF>(sums.d[1], k_major_descriptor(w_at + SLAB_BYTES), columns, accumulate);
            }
            wgmma_commit();
            if (before >= 0) {
                wgmma_wait<1>();
                release(before);
            }
            before = stage;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        wgmma_wait<0>();
        wgmma_pin(sums.d[0]);
        wgmma_pin(sums.d[1]);
        release(before);
        if (first % p.panels_per_tile == 0 && end == tile_end) {
            const Place<COLUMNS, GATED> place(p, tile);
#pragma unroll
            for (int f = 0; f < FRAGMENTS; ++f) {
                const uint32_t token = place.token + f * 8;
                if constexpr (GATED) {
                    store_fragment(p, place.part, place.row, token, gated(p, sums.fragment(0, f), sums.fragment(1, f)));
                } else {
                    store_fragment(p, place.part, place.row, token, sums.fragment(0, f));
                    store_fragment(p, place.part, place.row + 64, token, sums.fragment(1, f));
                }
            }
        } else {
            const SharedTile shared(p, tile);
            float4* to = p.partial + static_cast<size_t>(shared.slot(shared.own)) * (2 * FRAGMENTS * MULTIPLIERS) + threadIdx.x;
#pragma unroll
            for (int i = 0; i < 2 * FRAGMENTS; ++i) __stcg(to + i * MULTIPLIERS, sums.fragment(i / FRAGMENTS, i % FRAGMENTS));
            sync_multipliers();
            if (threadIdx.x == 0) {
                __threadfence();
                atomicAdd(shared.arrivals(p), 1);
            }
        }
    }
    // At the end only: the pair before this one comes to its part of a common tile last.
    const uint32_t first_tile = range.begin / p.panels_per_tile, last_tile = (range.end - 1) / p.panels_per_tile;
    const bool cut_before = range.begin % p.panels_per_tile != 0, cut_behind = range.end % p.panels_per_tile != 0;
    if (cut_before || (cut_behind && first_tile == last_tile)) add_up<COLUMNS, GATED>(p, first_tile);
    if (cut_behind && first_tile != last_tile) add_up<COLUMNS, GATED>(p, last_tile);
}

template <class T, int COLUMNS, int PANELS, int STAGES, bool MULTICAST, bool GATED> __device__ __forceinline__ void linear_mid(const LinearMidParams& p) {
    static_assert(MID_CUT % PANELS == 0, "a stage must not reach over a cut");
    extern __shared__ unsigned char shared_bytes[];
    auto& sh = *reinterpret_cast<MidShared<COLUMNS, PANELS, STAGES>*>((reinterpret_cast<uintptr_t>(shared_bytes) + 1023) & ~uintptr_t(1023));
    if (threadIdx.x == 0) {
        // A lane of each multiplying warp, of both thread blocks where each brings x for both.
        for (int i = 0; i < STAGES; ++i) barrier_init(&sh.full[i], 1), barrier_init(&sh.empty[i], MULTICAST ? 16 : 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if constexpr (MULTICAST) sync_pair();
    else __syncthreads();
    const Range range(p);
    if (threadIdx.x < MULTIPLIERS) {
        wait_for_previous_kernel();
        release_next_kernel();
        multiply<T, COLUMNS, PANELS, STAGES, MULTICAST, GATED>(sh, p, range);
    } else if (threadIdx.x == MULTIPLIERS) {
        feed<COLUMNS, PANELS, STAGES, MULTICAST, GATED>(sh, p, range);
    }
    // The other thread block may still write here, and arrive.
    if constexpr (MULTICAST) sync_pair();
}

#else

template <class T, int COLUMNS, int PANELS, int STAGES, bool MULTICAST, bool GATED> __device__ __forceinline__ void linear_mid(const LinearMidParams&) {}

#endif

} // namespace pagemill

#define LINEAR_MID_KERNEL(name, T, COLUMNS, PANELS, STAGES, MULTICAST, GATED, BLOCKS, CLUSTER)                       \
    extern "C" __global__ void __launch_bounds__(pagemill::MID_THREADS, BLOCKS) CLUSTER                             \
        linear_mid_##name(const __grid_constant__ pagemill::LinearMidParams p) {                                    \
        pagemill::linear_mid<pagemill::T, COLUMNS, PANELS, STAGES, MULTICAST, GATED>(p);                            \
    }

#ifdef LINEAR_TUNE
#define V(COLUMNS, PANELS, STAGES, BLOCKS)                                                                           \
    LINEAR_MID_KERNEL(n##COLUMNS##_p##PANELS##_s##STAGES, Bf16, COLUMNS, PANELS, STAGES, false, false, BLOCKS, )      \
    LINEAR_MID_KERNEL(gated_n##COLUMNS##_p##PANELS##_s##STAGES, Bf16, COLUMNS, PANELS, STAGES, false, true, BLOCKS, )
#define VM(COLUMNS, PANELS, STAGES, BLOCKS)                                                                           \
    LINEAR_MID_KERNEL(n##COLUMNS##_p##PANELS##_s##STAGES##_m, Bf16, COLUMNS, PANELS, STAGES, true, false, BLOCKS, __cluster_dims__(2, 1, 1)) \
    LINEAR_MID_KERNEL(gated_n##COLUMNS##_p##PANELS##_s##STAGES##_m, Bf16, COLUMNS, PANELS, STAGES, true, true, BLOCKS, __cluster_dims__(2, 1, 1))
#include "bench/linear_mid_variants.inc"
#endif
