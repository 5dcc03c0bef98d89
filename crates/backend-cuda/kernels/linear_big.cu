// y [T, N] = x [T, C] · W [N, C]^T for many tokens on Hopper, by whole warpgroups at the rate that the tensor cores (and
// the chip's power) allow. Decides how a cluster shares what it reads and in which order tiles are taken; the host
// (`src/kernels/linear_big.rs`) picks the form. Knows no layer.
//
// Letters: T tokens, N output features, C input features. A tile is 128 tokens by COLUMNS features; a panel 64 elements of
// C (one swizzled row of shared memory).
//
// Two or four thread blocks are a cluster: TOKEN_RANKS tiles along the tokens and FEATURE_RANKS along the features. A tile's
// rows of W are the same for all along the tokens, so each brings an equal share of them for all (multicast), and likewise x
// along the features: the L2 cache hands out each byte once a cluster. Clusters stay and take every so-manieth tile, in
// strips of `strip` tiles along the tokens, so that what is at work together reads few rows of both.
//
// One thread brings panels through a ring of stages and runs ahead into the next tile while two warpgroups, 64 tokens each,
// still store the last. Sums go out through shared memory in the copy engine's boxes, which it cuts at the ends of T and N.
// The first stages' weights are asked for before waiting for the previous kernel, since weights do not depend on it.
//
// The gated form has half of its columns from the gate and half from up: one thread holds both sums of an output.
// Up to three products of one x (q, k, v) share a launch: their tiles follow each other. A row's sums are in the order of C
// in every form.
#include "cluster.cuh"
#include "cluster_barriers.cuh"
#include "warpgroup_wide.cuh"

namespace pagemill {

constexpr int BIG_PARTS = 3;
constexpr int BIG_THREADS = 384; // a warpgroup that feeds and two that multiply

/// One product of x.
struct LinearBigPart {
    const float* bias; // [N] or null
    void* y;           // [T, N] elements of y_type
    uint32_t n;
    uint32_t num_tiles; // of COLUMNS features (gated: half as many)
};

struct LinearBigParams {
    CUtensorMap x_map;              // [T, C], boxes of 64 columns and 128 / FEATURE_RANKS rows
    CUtensorMap w_map[BIG_PARTS];   // [N, C], boxes of 64 columns and COLUMNS / 2 rows; gated: gate, up
    CUtensorMap y_map[BIG_PARTS];   // [T, N], boxes of 64 columns and 64 rows; read where y_type is BF16
    LinearBigPart parts[BIG_PARTS]; // behind the last: no tiles; gated: the first only, without bias
    uint32_t num_tokens;
    uint32_t num_feature_groups;    // FEATURE_RANKS tiles each, of all parts
    uint32_t num_panels;            // of C
    uint32_t strip;                 // groups of TOKEN_RANKS tiles that are taken side by side
    uint32_t y_type;                // ActivationType: F32 or BF16
    uint32_t activation;            // GateActivation
};
static_assert(sizeof(LinearBigPart) == 24 && sizeof(LinearBigParams) == 1024, "src/kernels/linear_big.rs has the same");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

constexpr int TILE_TOKENS = 128;
constexpr int PANEL_BYTES = TILE_TOKENS * 128; // of x
constexpr int STORED_BYTES = 64 * 128;         // 64 tokens and 64 features of y
constexpr int MULTIPLYING_WARPS = 8;

template <int COLUMNS, int STAGES> struct BigShared {
    alignas(1024) unsigned char x[STAGES][PANEL_BYTES];
    alignas(1024) unsigned char w[STAGES][COLUMNS * 128];
    alignas(1024) unsigned char y[2][2][STORED_BYTES]; // of each warpgroup, two in turn
    uint64_t full[STAGES], empty[STAGES];
};

/// Which stage comes next, and its parity.
template <int STAGES> struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

/// A thread block's tile: where it begins in its part.
struct BigTile {
    uint32_t token, part, feature;
};

/// The tiles of a thread block.
template <int COLUMNS, int TOKEN_RANKS, int FEATURE_RANKS, bool GATED> struct Tiles {
    static constexpr uint32_t RANKS = TOKEN_RANKS * FEATURE_RANKS, FEATURES = GATED ? COLUMNS / 2 : COLUMNS;
    const LinearBigParams& p;
    uint32_t token_rank, feature_rank, token_groups, at, end, step;
    __device__ __forceinline__ explicit Tiles(const LinearBigParams& params) : p(params) {
        const uint32_t rank = blockIdx.x % RANKS;
        token_rank = rank % TOKEN_RANKS, feature_rank = rank / TOKEN_RANKS;
        token_groups = (p.num_tokens + TILE_TOKENS * TOKEN_RANKS - 1) / (TILE_TOKENS * TOKEN_RANKS);
        at = blockIdx.x / RANKS, step = gridDim.x / RANKS, end = token_groups * p.num_feature_groups;
    }
    __device__ __forceinline__ bool done() const { return at >= end; }
    __device__ __forceinline__ void next() { at += step; }
    __device__ __forceinline__ BigTile tile() const {
        const uint32_t first = at / (p.strip * p.num_feature_groups) * p.strip, in_strip = at % (p.strip * p.num_feature_groups);
        const uint32_t height = min(p.strip, token_groups - first);
        BigTile tile = {((first + in_strip % height) * TOKEN_RANKS + token_rank) * TILE_TOKENS, 0, in_strip / height * FEATURE_RANKS + feature_rank};
        if constexpr (!GATED) {
#pragma unroll
            for (uint32_t i = 0; i + 1 < BIG_PARTS; ++i)
                if (tile.part == i && tile.feature >= p.parts[i].num_tiles && p.parts[i + 1].num_tiles > 0) tile.feature -= p.parts[i].num_tiles, tile.part = i + 1;
        }
        // Behind the last part's end lie no rows: boxes of zeros, and nothing is stored.
        tile.feature *= FEATURES;
        // The last tile of tokens ends where they do: boxes that reach beyond take long. What two tiles have, both store.
        if (p.num_tokens >= TILE_TOKENS && tile.token < p.num_tokens) tile.token = min(tile.token, p.num_tokens - TILE_TOKENS);
        return tile;
    }
};

/// A box of the tensor map to the same place in all of `ranks`' (a bit each) shared memory; the barrier of each counts its.
__device__ __forceinline__ void copy_box_to(void* to, const CUtensorMap* map, int column, int row, uint64_t* bar, uint16_t ranks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(shared_address(to)), "l"(map), "r"(column), "r"(row), "r"(shared_address(bar)), "h"(ranks) : "memory");
}
/// Shared memory to the tensor map's box at (column, row), cut at its ends.
__device__ __forceinline__ void store_box(const CUtensorMap* map, int column, int row, const void* from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
                 ::"l"(map), "r"(column), "r"(row), "r"(shared_address(from)) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Waits until all but the last `PENDING` boxes that this thread stored have been read.
template <int PENDING> __device__ __forceinline__ void await_stored_reads() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory"); }
__device__ __forceinline__ void await_stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/// Four 8 x 8 matrices of 16-bit elements from fragments to shared memory; lane 8i + r has the address of row r of the i-th.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

/// The feeding thread.
template <int COLUMNS, int STAGES, int TOKEN_RANKS, int FEATURE_RANKS, bool GATED>
__device__ __forceinline__ void feed(BigShared<COLUMNS, STAGES>& sh, const LinearBigParams& p) {
    using Mine = Tiles<COLUMNS, TOKEN_RANKS, FEATURE_RANKS, GATED>;
    constexpr int X_ROWS = TILE_TOKENS / FEATURE_RANKS, W_ROWS = COLUMNS / 2;
    struct Place {
        Mine tiles;
        BigTile tile;
        uint32_t panel = 0;
        __device__ __forceinline__ explicit Place(const LinearBigParams& p) : tiles(p), tile(tiles.tile()) {}
        __device__ __forceinline__ void next(uint32_t num_panels) {
            if (++panel < num_panels) return;
            panel = 0, tiles.next(), tile = tiles.tile();
        }
    };
    auto bring_weights = [&](int stage, const Place& at) {
        barrier_expect(&sh.full[stage], PANEL_BYTES + COLUMNS * 128);
        auto half = [&](uint32_t which) {
            unsigned char* to = sh.w[stage] + which * W_ROWS * 128;
            const CUtensorMap* map = &p.w_map[GATED ? which : at.tile.part];
            const int row = at.tile.feature + (GATED ? 0 : which * W_ROWS);
            if constexpr (TOKEN_RANKS == 1) copy_box(to, map, at.panel * 64, row, &sh.full[stage]);
            else copy_box_to(to, map, at.panel * 64, row, &sh.full[stage], 3u << (at.tiles.feature_rank * TOKEN_RANKS));
        };
        if constexpr (TOKEN_RANKS == 1) half(0), half(1);
        else half(at.tiles.token_rank);
    };
    auto bring_x = [&](int stage, const Place& at) {
        if constexpr (FEATURE_RANKS == 1) {
            copy_box(sh.x[stage], &p.x_map, at.panel * 64, at.tile.token, &sh.full[stage]);
        } else {
            const uint32_t first = at.tiles.feature_rank * X_ROWS;
            copy_box_to(sh.x[stage] + first * 128, &p.x_map, at.panel * 64, at.tile.token + first, &sh.full[stage],
                        (1u | 1u << TOKEN_RANKS) << at.tiles.token_rank);
        }
    };
    Place ahead(p), behind = ahead;
    int filled = 0;
#pragma unroll 1
    for (; !ahead.tiles.done() && filled < STAGES; ahead.next(p.num_panels), ++filled) bring_weights(filled, ahead);
    wait_for_previous_kernel();
#pragma unroll 1
    for (int stage = 0; stage < filled; ++stage, behind.next(p.num_panels)) bring_x(stage, behind);
    Ring<STAGES> ring;
#pragma unroll 1
    for (; !ahead.tiles.done(); ahead.next(p.num_panels), ring.next()) {
        barrier_wait_for_cluster(&sh.empty[ring.stage], ring.parity);
        bring_weights(ring.stage, ahead);
        bring_x(ring.stage, ahead);
    }
}

/// A warpgroup's 64 tokens of a tile, of which it holds `d`, to y as f32.
template <int COUNT>
__device__ __forceinline__ void store_f32(const LinearBigParams& p, const LinearBigPart& part, const float (&d)[COUNT], uint32_t token, uint32_t feature, int thread) {
    const uint32_t row = token + thread / 32 * 16 + thread % 32 / 4, column = feature + thread % 4 * 2;
    float* y = static_cast<float*>(part.y);
#pragma unroll
    for (int j = 0; j < COUNT / 4; ++j) {
        if (column + j * 8 >= part.n) break;
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (row + h * 8 < p.num_tokens)
                *reinterpret_cast<float2*>(y + static_cast<size_t>(row + h * 8) * part.n + column + j * 8) = make_float2(d[j * 4 + h * 2], d[j * 4 + h * 2 + 1]);
    }
}

/// The same as bf16, 64 features at a time by way of one of `staged` in turn.
template <int COUNT>
__device__ __forceinline__ void store_bf16(unsigned char (&staged)[2][STORED_BYTES], uint32_t& turn, const CUtensorMap* map, uint32_t n,
                                           const float (&d)[COUNT], uint32_t token, uint32_t feature, int thread, int barrier) {
    const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
#pragma unroll
    for (int chunk = 0; chunk < COUNT / 32; ++chunk) {
        if (feature + chunk * 64 >= n) break;
        if (thread == 0) await_stored_reads<1>();
        named_sync(barrier, 128);
        const uint32_t to = shared_address(staged[turn % 2]) + row * 128;
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            const float* v = &d[(chunk * 8 + j) * 4];
            store_matrices(to + ((j + lane / 16) ^ (row % 8)) * 16, Bf16::pack(v[0], v[1]), Bf16::pack(v[2], v[3]), Bf16::pack(v[4], v[5]), Bf16::pack(v[6], v[7]));
        }
        fence_async_proxy();
        named_sync(barrier, 128);
        if (thread == 0) store_box(map, feature + chunk * 64, token, staged[turn % 2]);
        ++turn;
    }
}

/// y = act(gate) * up, of sums `d` of both.
template <GateActivation ACTIVATION, int COUNT> __device__ __forceinline__ void gate_by(float (&y)[COUNT], const float (&d)[2 * COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) y[i] = gate_activation(d[i], ACTIVATION) * d[COUNT + i];
}

/// A multiplying warpgroup: 64 tokens of every tile.
template <class T, int COLUMNS, int STAGES, int TOKEN_RANKS, int FEATURE_RANKS, bool GATED>
__device__ __forceinline__ void multiply(BigShared<COLUMNS, STAGES>& sh, const LinearBigParams& p, int warpgroup, int thread) {
    constexpr int RANKS = TOKEN_RANKS * FEATURE_RANKS;
    const int lane = thread % 32;
    Ring<STAGES> ring;
    uint32_t turn = 0; // of the two places that a box goes out from
    // Each lane of the first few tells another thread block.
    auto release = [&](int stage) {
        if constexpr (RANKS == 1) {
            if (lane == 0) barrier_arrive(&sh.empty[stage]);
        } else {
            if (lane < RANKS) barrier_arrive_at(address_at(&sh.empty[stage], lane));
        }
    };
    for (Tiles<COLUMNS, TOKEN_RANKS, FEATURE_RANKS, GATED> tiles(p); !tiles.done(); tiles.next()) {
        float d[COLUMNS / 2];
        int last = 0;
#pragma unroll 1
        for (uint32_t panel = 0; panel < p.num_panels; ++panel) {
            barrier_wait(&sh.full[ring.stage], ring.parity);
            const uint32_t x = shared_address(sh.x[ring.stage]) + warpgroup * 64 * 128, w = shared_address(sh.w[ring.stage]);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k) wgmma_wide_ss<T, COLUMNS>(d, k_major_descriptor(x + k * 32), k_major_descriptor(w + k * 32), panel > 0 || k > 0);
            wgmma_commit();
            // One panel's products stay under way while the stage before is given back.
            wgmma_wait<1>();
            if (panel > 0) release(last);
            last = ring.stage;
            ring.next();
        }
        wgmma_wait<0>();
        wgmma_pin(d);
        release(last);
        const BigTile tile = tiles.tile();
        const LinearBigPart part = p.parts[tile.part];
        const uint32_t token = tile.token + warpgroup * 64;
        if (token >= p.num_tokens || tile.feature >= part.n) continue;
        if constexpr (GATED) {
            float y[COLUMNS / 4];
            if (p.activation == GATE_SILU) gate_by<GATE_SILU>(y, d);
            else gate_by<GATE_GELU_TANH>(y, d);
            if (p.y_type == ACT_F32) store_f32(p, part, y, token, tile.feature, thread);
            else store_bf16(sh.y[warpgroup], turn, &p.y_map[0], part.n, y, token, tile.feature, thread, 1 + warpgroup);
        } else {
            if (part.bias != nullptr) {
#pragma unroll
                for (int i = 0; i < COLUMNS / 2; i += 4) {
                    const uint32_t column = tile.feature + i * 2 + lane % 4 * 2;
                    const float low = column < part.n ? __ldg(part.bias + column) : 0.0f, high = column < part.n ? __ldg(part.bias + column + 1) : 0.0f;
                    d[i] += low, d[i + 1] += high, d[i + 2] += low, d[i + 3] += high;
                }
            }
            if (p.y_type == ACT_F32) store_f32(p, part, d, token, tile.feature, thread);
            else store_bf16(sh.y[warpgroup], turn, &p.y_map[tile.part], part.n, d, token, tile.feature, thread, 1 + warpgroup);
        }
    }
    if (thread == 0) await_stored();
    __syncwarp();
}

template <class T, int COLUMNS, int STAGES, int TOKEN_RANKS, int FEATURE_RANKS, bool GATED> __device__ __forceinline__ void linear_big(const LinearBigParams& p) {
    static_assert(TOKEN_RANKS <= 2 && FEATURE_RANKS <= 2, "a share of a tile is half of its rows, or all");
    extern __shared__ unsigned char shared_bytes[];
    auto& sh = *reinterpret_cast<BigShared<COLUMNS, STAGES>*>((reinterpret_cast<uintptr_t>(shared_bytes) + 1023) & ~uintptr_t(1023));
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier_init(&sh.full[i], 1), barrier_init(&sh.empty[i], TOKEN_RANKS * FEATURE_RANKS * MULTIPLYING_WARPS);
    }
    __syncwarp();
    announce_to_cluster();
    await_cluster();
    const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (thread == 0) feed<COLUMNS, STAGES, TOKEN_RANKS, FEATURE_RANKS, GATED>(sh, p);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        wait_for_previous_kernel();
        release_next_kernel();
        multiply<T, COLUMNS, STAGES, TOKEN_RANKS, FEATURE_RANKS, GATED>(sh, p, warpgroup - 1, thread);
    }
    // Others may still bring a share of this one's tiles, or tell it of stages.
    cluster_arrive();
    cluster_wait();
}

#else

template <class T, int COLUMNS, int STAGES, int TOKEN_RANKS, int FEATURE_RANKS, bool GATED> __device__ __forceinline__ void linear_big(const LinearBigParams&) {}

#endif

} // namespace pagemill

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define BIG_CLUSTER(RANKS) __cluster_dims__(RANKS, 1, 1)
#else
#define BIG_CLUSTER(RANKS)
#endif
#define LINEAR_BIG_KERNEL(name, T, COLUMNS, STAGES, TOKEN_RANKS, FEATURE_RANKS, GATED)                                 \
    extern "C" __global__ void __launch_bounds__(pagemill::BIG_THREADS, 1) BIG_CLUSTER((TOKEN_RANKS) * (FEATURE_RANKS)) \
        linear_big_##name(const __grid_constant__ pagemill::LinearBigParams p) {                                       \
        pagemill::linear_big<pagemill::T, COLUMNS, STAGES, TOKEN_RANKS, FEATURE_RANKS, GATED>(p);                      \
    }

#ifdef LINEAR_TUNE
#define V(COLUMNS, STAGES, TOKEN_RANKS, FEATURE_RANKS, GATED)                                                          \
    LINEAR_BIG_KERNEL(n##COLUMNS##_s##STAGES##_##TOKEN_RANKS##FEATURE_RANKS##_##GATED, Bf16, COLUMNS, STAGES, TOKEN_RANKS, FEATURE_RANKS, GATED)
#include "bench/linear_big_variants.inc"
#else
// As `src/kernels/linear_big.rs` has it; the other forms are for comparison (NOTES.md).
LINEAR_BIG_KERNEL(bf16, Bf16, 128, 6, 2, 1, false)
LINEAR_BIG_KERNEL(f16, F16, 128, 6, 2, 1, false)
#endif
