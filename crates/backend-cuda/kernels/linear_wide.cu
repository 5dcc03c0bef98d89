// y [T, N] = x [T, C] · W [N, C]^T for 129 to 256 tokens on Hopper: a tile has all tokens and up to 224 features, so that
// little of x is read more than once, and few bytes of shared memory a product of tensor cores. Decides how a thread
// block brings weights and x; the host (`src/kernels/linear_wide.rs`) picks the form and the cut of C. Knows no layer.
//
// Letters: T tokens, N output features, C input features. A tile is 256 tokens by COLUMNS features; a panel 64 elements of
// C (one swizzled row of shared memory).
//
// Two thread blocks are a cluster: neighbouring tiles of features. Each brings half of the tokens of x for both
// (multicast) and its own weights. Clusters stay and take every so-manieth pair of tiles.
//
// Two threads feed, through rings of their own: weights, which wait for nothing but room, since they do not depend on the
// previous kernel; and x. Two warpgroups multiply, 64-token blocks in turn: with 192 tokens or less the second has one.
//
// C is one range, or cut into several (planes), whose f32 sums are stored apart: whoever reads y adds them in order. A
// row's bits depend on its token, the weight and the cut of C only.
//
// The gated form has half of its columns from the gate and half from up: one thread holds both sums of an output. Up to
// three products of one x share a launch: their tiles follow each other.
#include "cluster_barriers.cuh"
#include "warpgroup_wide2.cuh"

namespace pagemill {

constexpr int WIDE_PARTS = 3;

/// One product of x.
struct LinearWidePart {
    const float* bias; // [N] or null
    void* y;           // [planes, T, N] elements of y_type
    uint32_t n;        // a multiple of 8
    uint32_t num_tiles; // of COLUMNS features (gated: half as many)
};

struct LinearWideParams {
    CUtensorMap x_map;                // [T, C], boxes of 64 columns and x_rows
    CUtensorMap w_map[WIDE_PARTS];    // [N, C], boxes of 64 columns and COLUMNS rows; gated: gate, up, of half as many
    LinearWidePart parts[WIDE_PARTS]; // behind the last: no tiles; gated: the first only, without bias
    uint64_t plane_stride;            // bytes of y from plane to plane
    uint32_t num_tokens;
    uint32_t x_rows;                  // that each of a cluster brings: a multiple of 8, together T and less than 16 more
    uint32_t num_groups;              // of a cluster's tiles, of all parts
    uint32_t num_panels;              // of C
    uint32_t num_cuts;                // of C: planes
    uint32_t y_type;                  // ActivationType: F32 or BF16
    uint32_t activation;              // GateActivation
};
static_assert(sizeof(LinearWidePart) == 24 && sizeof(LinearWideParams) == 640, "src/kernels/linear_wide.rs has the same");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

constexpr int WIDE_TOKENS = 256;
constexpr int X_BYTES = WIDE_TOKENS * 128; // a panel of x
constexpr int MULTIPLYING_WARPS = 8;
constexpr int STAGED_BYTES = 128;                 // of a token: outputs leave through shared memory, 64 bf16 or 32 f32 at a time
constexpr int STAGED_STRIDE = STAGED_BYTES + 16; // rows meet no bank twice
#ifndef EARLY
#define EARLY 1
#endif
#ifndef WIDE_PREFETCH
#define WIDE_PREFETCH 0
#endif

template <class ELEMENT, int COLUMNS_, int SLOTS_, int RANKS_, bool GATED_, bool ONCE_ = false> struct WideForm {
    using T = ELEMENT;
    static constexpr bool ONCE = ONCE_;
    static constexpr int FEEDERS = ONCE ? 0 : 128, THREADS = FEEDERS + 256;
    static constexpr int COLUMNS = COLUMNS_, SLOTS = SLOTS_, RANKS = RANKS_;
    static constexpr bool GATED = GATED_;
    static constexpr int FEATURES = GATED ? COLUMNS / 2 : COLUMNS; // of y
    static_assert(RANKS <= 2, "a share of x is half of its rows, or all");
    static_assert(FEATURES % 8 == 0, "boxes begin where the swizzle does");
};

template <class F> struct WideShared {
    alignas(1024) unsigned char x[F::SLOTS][X_BYTES];
    alignas(1024) unsigned char w[F::SLOTS][F::COLUMNS * 128];
    alignas(16) unsigned char staged[MULTIPLYING_WARPS][16 * STAGED_STRIDE];
    uint64_t full[F::SLOTS], w_empty[F::SLOTS], x_empty[F::SLOTS];
    uint32_t feature, panel; // where a tile that is fed by who multiplies begins
};

/// A ring's place: which slot, and the parity of its turn.
template <int SLOTS> struct Ring {
    int slot = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance() {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

/// A thread block's work: a tile's first feature in its part, and panels [panel, panel_end) of C.
struct WideTile {
    uint32_t part, feature, cut, panel, panel_end;
};

/// The tiles of a thread block.
template <class F> struct WideTiles {
    const LinearWideParams& p;
    uint32_t at;
    __device__ __forceinline__ explicit WideTiles(const LinearWideParams& params) : p(params), at(blockIdx.x / F::RANKS) {}
    __device__ __forceinline__ bool done() const { return at >= p.num_groups * p.num_cuts; }
    __device__ __forceinline__ void next() { at += gridDim.x / F::RANKS; }
    __device__ __forceinline__ uint32_t feature() const { return (at % p.num_groups * F::RANKS + blockIdx.x % F::RANKS) * F::FEATURES; }
    __device__ __forceinline__ int first_panel() const { return at / p.num_groups * p.num_panels / p.num_cuts; }
    __device__ __forceinline__ int num_panels() const {
        const uint32_t cut = at / p.num_groups;
        return (cut + 1) * p.num_panels / p.num_cuts - cut * p.num_panels / p.num_cuts;
    }
    __device__ __forceinline__ WideTile tile() const {
        const uint32_t cut = at / p.num_groups;
        WideTile tile = {0, at % p.num_groups * F::RANKS + blockIdx.x % F::RANKS, cut, cut * p.num_panels / p.num_cuts, (cut + 1) * p.num_panels / p.num_cuts};
        if constexpr (!F::GATED) {
#pragma unroll
            for (uint32_t i = 0; i + 1 < WIDE_PARTS; ++i)
                if (tile.part == i && tile.feature >= p.parts[i].num_tiles && p.parts[i + 1].num_tiles > 0) tile.feature -= p.parts[i].num_tiles, tile.part = i + 1;
        }
        // Behind the last part's end lie no rows: boxes of zeros, and nothing is stored.
        tile.feature *= F::FEATURES;
        return tile;
    }
};

/// The low word of `k_major_descriptor`.
__device__ __forceinline__ uint32_t descriptor_word(uint32_t address) { return (address & 0x3ffff) >> 4 | 1 << 16; }
/// As `barrier_arrive`, told an address.
__device__ __forceinline__ void barrier_arrive_here(uint32_t bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
/// A box of the tensor map, of what is read once.
__device__ __forceinline__ void copy_box_once(void* to, const CUtensorMap* map, int column, int row, uint64_t* bar, uint64_t once) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(shared_address(to)), "l"(map), "r"(column), "r"(row), "r"(shared_address(bar)), "l"(once) : "memory");
}
/// The cache policy of what is read once: the first to leave L2.
__device__ __forceinline__ uint64_t read_once_policy() {
    uint64_t once;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    return once;
}
/// A box of the tensor map to the same place in both thread blocks' shared memory; the barrier of each counts its.
__device__ __forceinline__ void copy_box_to_both(void* to, const CUtensorMap* map, int column, int row, uint64_t* bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(shared_address(to)), "l"(map), "r"(column), "r"(row), "r"(shared_address(bar)), "h"(uint16_t(3)) : "memory");
}
/// Has L2 fetch a box.
__device__ __forceinline__ void prefetch_box(const CUtensorMap* map, int column, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(column), "r"(row) : "memory");
}

/// Brings the tiles' weights. One thread.
template <class F> __device__ __forceinline__ void feed_weights(WideShared<F>& sh, const LinearWideParams& p) {
    const uint64_t once = read_once_policy();
    Ring<F::SLOTS> at;
    for (WideTiles<F> tiles(p); !tiles.done(); tiles.next()) {
        const WideTile tile = tiles.tile();
        const CUtensorMap* map = &p.w_map[tile.part];
        if constexpr (WIDE_PREFETCH > 0) {
#pragma unroll 1
            for (uint32_t panel = tile.panel; panel < min(tile.panel_end, tile.panel + WIDE_PREFETCH); ++panel) {
                prefetch_box(map, panel * 64, tile.feature);
                if constexpr (F::GATED) prefetch_box(map + 1, panel * 64, tile.feature);
            }
        }
#pragma unroll 1
        for (uint32_t panel = tile.panel; panel < tile.panel_end; ++panel, at.advance()) {
            if (WIDE_PREFETCH > 0 && panel + WIDE_PREFETCH < tile.panel_end) {
                prefetch_box(map, (panel + WIDE_PREFETCH) * 64, tile.feature);
                if constexpr (F::GATED) prefetch_box(map + 1, (panel + WIDE_PREFETCH) * 64, tile.feature);
            }
            uint64_t* full = &sh.full[at.slot];
            unsigned char* to = sh.w[at.slot];
            barrier_wait(&sh.w_empty[at.slot], at.parity ^ 1);
            barrier_expect(full, F::COLUMNS * 128);
            copy_box_once(to, map, panel * 64, tile.feature, full, once);
            if constexpr (F::GATED) copy_box_once(to + F::FEATURES * 128, map + 1, panel * 64, tile.feature, full, once);
        }
    }
}

/// Brings x, once a tile. One thread.
template <class F> __device__ __forceinline__ void feed_x(WideShared<F>& sh, const LinearWideParams& p) {
    wait_for_previous_kernel();
    const uint32_t first = blockIdx.x % F::RANKS * p.x_rows;
    Ring<F::SLOTS> at;
    for (WideTiles<F> tiles(p); !tiles.done(); tiles.next()) {
        const WideTile tile = tiles.tile();
#pragma unroll 1
        for (uint32_t panel = tile.panel; panel < tile.panel_end; ++panel, at.advance()) {
            barrier_wait_for_cluster(&sh.x_empty[at.slot], at.parity ^ 1);
            barrier_expect(&sh.full[at.slot], F::RANKS * p.x_rows * 128);
            if constexpr (F::RANKS == 1) copy_box(sh.x[at.slot], &p.x_map, panel * 64, 0, &sh.full[at.slot]);
            else copy_box_to_both(sh.x[at.slot] + first * 128, &p.x_map, panel * 64, first, &sh.full[at.slot]);
        }
    }
}

/// Four 8 x 8 matrices of 16-bit elements from fragments to shared memory; lane 8i + r has the address of row r of the i-th.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

/// `gate_activation(x) * up` without branches, so that a thread's many outputs are under way at once: both activations are
/// x times a sigmoid (the tanh form of GELU: 0.5 (1 + tanh u) = sigmoid(2 u)).
__device__ __forceinline__ float gated(float x, float up, uint32_t activation) {
    const float z = activation == GATE_SILU ? x : 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return __fdividef(x, 1.0f + __expf(-z)) * up;
}

/// Where a warp's 16 tokens of a tile go.
struct WidePlace {
    unsigned char* y; // of the plane
    uint32_t n, num_tokens, token, feature;
};

/// Staged outputs of a warp to y: `COUNT` pieces of 16 bytes of each token, from feature `at.feature + first` on.
template <int COUNT, int BYTES> __device__ __forceinline__ void store_staged(const unsigned char* staged, const WidePlace& at, uint32_t first) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < (16 * COUNT + 31) / 32; ++i) {
        const uint32_t piece = threadIdx.x % 32 + i * 32, row = piece / COUNT, block = piece % COUNT, feature = at.feature + first + block * (16 / BYTES);
        if (piece < 16 * COUNT && at.token + row < at.num_tokens && feature < at.n)
            *reinterpret_cast<uint4*>(at.y + (size_t(at.token + row) * at.n + feature) * BYTES) = *reinterpret_cast<const uint4*>(staged + row * STAGED_STRIDE + block * 16);
    }
    __syncwarp();
}

/// A warp's sums to y as f32, 32 features at a time.
template <class F> __device__ __forceinline__ void store_f32(unsigned char* staged, const WidePlace& at, const float (&d)[F::FEATURES / 2]) {
    unsigned char* to = staged + threadIdx.x % 32 / 4 * STAGED_STRIDE + threadIdx.x % 4 * 8;
    constexpr int BLOCKS = F::FEATURES / 8, WHOLE = BLOCKS / 4 * 4;
    auto stage = [&](int block, int count) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (j >= count) continue;
            const float* v = &d[(block + j) * 4];
            *reinterpret_cast<float2*>(to + j * 32) = make_float2(v[0], v[1]);
            *reinterpret_cast<float2*>(to + 8 * STAGED_STRIDE + j * 32) = make_float2(v[2], v[3]);
        }
    };
#pragma unroll
    for (int block = 0; block < WHOLE; block += 4) stage(block, 4), store_staged<8, 4>(staged, at, block * 8);
    if constexpr (WHOLE < BLOCKS) stage(WHOLE, BLOCKS - WHOLE), store_staged<(BLOCKS - WHOLE) * 2, 4>(staged, at, WHOLE * 8);
}

/// The same as bf16, 64 features at a time.
template <class F> __device__ __forceinline__ void store_bf16(unsigned char* staged, const WidePlace& at, const float (&d)[F::FEATURES / 2]) {
    const uint32_t lane = threadIdx.x % 32, to = shared_address(staged) + lane % 16 * STAGED_STRIDE + lane / 16 * 16;
    constexpr int BLOCKS = F::FEATURES / 8, WHOLE = BLOCKS / 8 * 8;
    auto stage = [&](int block, int count) {
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            if (j >= count) continue;
            const float* v = &d[(block + j) * 4];
            const float* w = j + 1 < count ? v + 4 : v; // behind an odd end: room that nobody reads
            store_matrices(to + j * 16, Bf16::pack(v[0], v[1]), Bf16::pack(v[2], v[3]), Bf16::pack(w[0], w[1]), Bf16::pack(w[2], w[3]));
        }
    };
#pragma unroll
    for (int block = 0; block < WHOLE; block += 8) stage(block, 8), store_staged<8, 2>(staged, at, block * 8);
    if constexpr (WHOLE < BLOCKS) stage(WHOLE, BLOCKS - WHOLE), store_staged<BLOCKS - WHOLE, 2>(staged, at, WHOLE * 8);
}

/// A warpgroup's sums of a tile, for 64 tokens from `token` on, finished and stored.
template <class F> __device__ __forceinline__ void store_sums(WideShared<F>& sh, const LinearWideParams& p, const WideTile& tile, uint32_t token, float (&d)[F::COLUMNS / 2]) {
    const LinearWidePart& part = p.parts[tile.part];
    const uint32_t warp = (threadIdx.x - F::FEEDERS) / 32;
    const WidePlace at = {static_cast<unsigned char*>(part.y) + tile.cut * p.plane_stride, part.n, p.num_tokens, token + warp % 4 * 16, tile.feature};
    float y[F::FEATURES / 2];
    if constexpr (F::GATED) {
#pragma unroll
        for (int i = 0; i < F::FEATURES / 2; ++i) y[i] = gated(d[i], d[F::FEATURES / 2 + i], p.activation);
    } else {
        const float* bias = tile.cut == 0 ? part.bias : nullptr;
#pragma unroll
        for (int i = 0; i < F::FEATURES / 2; i += 4) {
            const uint32_t column = tile.feature + i * 2 + threadIdx.x % 4 * 2;
            const bool has = bias != nullptr && column < part.n;
            const float low = has ? __ldg(bias + column) : 0.0f, high = has ? __ldg(bias + column + 1) : 0.0f;
            y[i] = d[i] + low, y[i + 1] = d[i + 1] + high, y[i + 2] = d[i + 2] + low, y[i + 3] = d[i + 3] + high;
        }
    }
    if (p.y_type == ACT_F32) store_f32<F>(sh.staged[warp], at, y);
    else store_bf16<F>(sh.staged[warp], at, y);
}

/// A multiplying warpgroup: 64 tokens of every tile, and 64 more where `BLOCKS` is 2. Sums take nearly all registers: what
/// the loop needs beside them are few words.
template <class F, int BLOCKS> __device__ __forceinline__ void multiply(WideShared<F>& sh, const LinearWideParams& p, uint32_t warpgroup) {
    constexpr uint32_t K_STEP = 32 >> 4, NEXT_BLOCK = 128 * 128 >> 4; // of a descriptor's low word
    const uint32_t first_x = descriptor_word(shared_address(sh.x)) + warpgroup * (64 * 128 >> 4), first_w = descriptor_word(shared_address(sh.w));
    // Lanes tell both thread blocks, one each, that a slot of x is free; the first lane tells this one of the weights'.
    const bool tells = threadIdx.x % 32 < F::RANKS, tells_here = threadIdx.x % 32 == 0;
    const uint32_t x_empty = F::RANKS == 1 ? shared_address(sh.x_empty) : address_at(sh.x_empty, threadIdx.x % 32 % F::RANKS);
    Ring<F::SLOTS> at;
    auto release = [&] {
        const uint32_t offset = (at.slot == 0 ? F::SLOTS - 1 : at.slot - 1) * 8;
        if (tells) barrier_arrive_at(x_empty + offset);
        if (tells_here) barrier_arrive_here(shared_address(sh.w_empty) + offset);
    };
#pragma unroll 1
    for (WideTiles<F> tiles(p); !tiles.done(); tiles.next()) {
        float d[BLOCKS][F::COLUMNS / 2];
#pragma unroll
        for (int i = 0; i < BLOCKS * F::COLUMNS / 2; ++i) d[i / (F::COLUMNS / 2)][i % (F::COLUMNS / 2)] = 0;
        const int count = tiles.num_panels();
#pragma unroll 1
        for (int panel = 0; panel < count; ++panel) {
            barrier_wait(&sh.full[at.slot], at.parity);
            const uint32_t x = first_x + at.slot * (X_BYTES >> 4), w = first_w + at.slot * (F::COLUMNS * 128 >> 4);
            wgmma_fence();
            auto step = [&](int k) {
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block) wgmma_wide_add<typename F::T, F::COLUMNS>(d[block], x + block * NEXT_BLOCK + k * K_STEP, w + k * K_STEP);
                wgmma_commit();
            };
            // The first products are under way while the slot before is given back.
            step(0);
            if (EARLY) {
                wgmma_wait<1>();
                if (panel > 0) release();
                wgmma_fence();
            }
            step(1), step(2), step(3);
            if (!EARLY) {
                wgmma_wait<4>();
                if (panel > 0) release();
            }
            at.advance();
        }
        wgmma_wait<0>();
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) wgmma_pin(d[block]);
        release();
        const WideTile tile = tiles.tile();
        if (tile.feature >= p.parts[tile.part].n) continue;
#ifdef TRIVIAL
        float* y = static_cast<float*>(p.parts[0].y) + threadIdx.x;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
        for (int i = 0; i < F::COLUMNS / 2; ++i) y[(block * 112 + i) * 256] = d[block][i];
#else
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) store_sums<F>(sh, p, tile, warpgroup * 64 + block * 128, d[block]);
#endif
    }
}

/// A panel of a tile to a slot: weights, or this thread block's share of x.
template <class F> __device__ __forceinline__ void bring_w(WideShared<F>& sh, const LinearWideParams& p, uint32_t feature, int panel, int slot) {
    if constexpr (WIDE_PREFETCH > 0) {
        prefetch_box(&p.w_map[0], (panel + WIDE_PREFETCH) * 64, feature);
        if constexpr (F::GATED) prefetch_box(&p.w_map[1], (panel + WIDE_PREFETCH) * 64, feature);
    }
    barrier_expect(&sh.full[slot], F::COLUMNS * 128);
#ifdef HINT
    const uint64_t once = read_once_policy();
    copy_box_once(sh.w[slot], &p.w_map[0], panel * 64, feature, &sh.full[slot], once);
    if constexpr (F::GATED) copy_box_once(sh.w[slot] + F::FEATURES * 128, &p.w_map[1], panel * 64, feature, &sh.full[slot], once);
#else
    copy_box(sh.w[slot], &p.w_map[0], panel * 64, feature, &sh.full[slot]);
    if constexpr (F::GATED) copy_box(sh.w[slot] + F::FEATURES * 128, &p.w_map[1], panel * 64, feature, &sh.full[slot]);
#endif
}
template <class F> __device__ __forceinline__ void bring_x(WideShared<F>& sh, const LinearWideParams& p, int panel, int slot) {
    const uint32_t first = blockIdx.x % F::RANKS * p.x_rows;
    barrier_expect(&sh.full[slot], F::RANKS * p.x_rows * 128);
    if constexpr (F::RANKS == 1) copy_box(sh.x[slot], &p.x_map, panel * 64, 0, &sh.full[slot]);
    else copy_box_to_both(sh.x[slot] + first * 128, &p.x_map, panel * 64, first, &sh.full[slot]);
}

/// As `multiply`, of one tile, where there are no threads but the multiplying ones: they have all registers between them,
/// and one of them feeds. `feeds` is that one.
template <class F, int BLOCKS> __device__ __forceinline__ void multiply_once(WideShared<F>& sh, const LinearWideParams& p, uint32_t warpgroup, bool feeds) {
    constexpr uint32_t K_STEP = 32 >> 4, NEXT_BLOCK = 128 * 128 >> 4; // of a descriptor's low word
    const WideTiles<F> tiles(p);
    const int count = tiles.num_panels();
    const uint32_t first_x = descriptor_word(shared_address(sh.x)) + warpgroup * (64 * 128 >> 4), first_w = descriptor_word(shared_address(sh.w));
    const bool tells = threadIdx.x % 32 < F::RANKS, tells_here = threadIdx.x % 32 == 0;
    const uint32_t x_empty = F::RANKS == 1 ? shared_address(sh.x_empty) : address_at(sh.x_empty, threadIdx.x % 32 % F::RANKS);
    Ring<F::SLOTS> at;
    float d[BLOCKS][F::COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < BLOCKS * F::COLUMNS / 2; ++i) d[i / (F::COLUMNS / 2)][i % (F::COLUMNS / 2)] = 0;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) wgmma_pin(d[block]);
#pragma unroll 1
    for (int panel = 0; panel < count; ++panel) {
        barrier_wait(&sh.full[at.slot], at.parity);
        const uint32_t x = first_x + at.slot * (X_BYTES >> 4), w = first_w + at.slot * (F::COLUMNS * 128 >> 4);
        wgmma_fence();
        auto step = [&](int k) {
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) wgmma_wide_add<typename F::T, F::COLUMNS>(d[block], x + block * NEXT_BLOCK + k * K_STEP, w + k * K_STEP);
            wgmma_commit();
        };
        auto refill = [&] {
            if (panel == 0) return;
            const int last = at.slot == 0 ? F::SLOTS - 1 : at.slot - 1, next = panel - 1 + F::SLOTS;
            if (tells) barrier_arrive_at(x_empty + last * 8);
            if (tells_here) barrier_arrive_here(shared_address(sh.w_empty) + last * 8);
            if (feeds && next < count) {
                const uint32_t parity = at.slot == 0 ? at.parity ^ 1 : at.parity; // of the turn that the slot was in
                const uint32_t feature = sh.feature, at_panel = sh.panel + next;
                barrier_wait(&sh.w_empty[last], parity);
                bring_w<F>(sh, p, feature, at_panel, last);
                barrier_wait_for_cluster(&sh.x_empty[last], parity);
                bring_x<F>(sh, p, at_panel, last);
            }
        };
        // The first products are under way while the slot before is given back, and filled.
        step(0);
        if (EARLY) {
            wgmma_wait<1>();
            refill();
            __syncwarp();
            wgmma_fence();
        }
        step(1), step(2), step(3);
        if (!EARLY) {
            wgmma_wait<4>();
            refill();
        }
        at.advance();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) wgmma_pin(d[block]);
    const WideTile tile = tiles.tile();
    if (tile.feature >= p.parts[0].n) return;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) store_sums<F>(sh, p, tile, warpgroup * 64 + block * 128, d[block]);
}

template <class F> __device__ __forceinline__ void linear_wide(const LinearWideParams& p) {
    static_assert(sizeof(WideShared<F>) <= 227 << 10, "the slots fit");
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    auto& sh = *reinterpret_cast<WideShared<F>*>(shared_bytes);
    if (threadIdx.x == 0) {
        for (int i = 0; i < F::SLOTS; ++i) {
            barrier_init(&sh.full[i], 2); // the feeding threads
            barrier_init(&sh.w_empty[i], MULTIPLYING_WARPS), barrier_init(&sh.x_empty[i], F::RANKS * MULTIPLYING_WARPS);
        }
    }
    if constexpr (F::RANKS > 1) {
        __syncwarp();
        announce_to_cluster();
        await_cluster();
    } else {
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        __syncthreads();
    }
    const uint32_t warpgroup = threadIdx.x / 128;
    if constexpr (F::ONCE) {
        const bool feeds = threadIdx.x == 7 * 32;
        if (feeds) {
            const WideTiles<F> tiles(p);
            const int count = min(tiles.num_panels(), F::SLOTS);
            sh.feature = tiles.feature(), sh.panel = tiles.first_panel();
            for (int i = 0; i < count; ++i) bring_w<F>(sh, p, tiles.feature(), tiles.first_panel() + i, i);
            for (int i = F::SLOTS; i < WIDE_PREFETCH; ++i) {
                prefetch_box(&p.w_map[0], (tiles.first_panel() + i) * 64, tiles.feature());
                if constexpr (F::GATED) prefetch_box(&p.w_map[1], (tiles.first_panel() + i) * 64, tiles.feature());
            }
            wait_for_previous_kernel();
            for (int i = 0; i < count; ++i) bring_x<F>(sh, p, tiles.first_panel() + i, i);
        }
        __syncwarp();
        wait_for_previous_kernel();
        release_next_kernel();
        if (warpgroup * 64 + 128 < p.num_tokens) multiply_once<F, 2>(sh, p, warpgroup, feeds);
        else multiply_once<F, 1>(sh, p, warpgroup, feeds);
    } else if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) feed_weights<F>(sh, p);
        if (threadIdx.x == 32) feed_x<F>(sh, p);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        wait_for_previous_kernel();
        release_next_kernel();
        const uint32_t nth = warpgroup - 1;
        if (nth * 64 + 128 < p.num_tokens) multiply<F, 2>(sh, p, nth);
        else multiply<F, 1>(sh, p, nth);
    }
    // The other may still bring its share of this one's x, or tell it of slots.
    if constexpr (F::RANKS > 1) {
        __syncwarp();
        asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
}

#else

template <class ELEMENT, int COLUMNS_, int SLOTS_, int RANKS_, bool GATED_, bool ONCE_ = false> struct WideForm {
    static constexpr int RANKS = RANKS_;
};
template <class F> __device__ __forceinline__ void linear_wide(const LinearWideParams&) {}

#endif

} // namespace pagemill

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define WIDE_CLUSTER(RANKS) __cluster_dims__(RANKS, 1, 1)
#else
#define WIDE_CLUSTER(RANKS)
#endif
#define LINEAR_WIDE_KERNEL(name, T, COLUMNS, SLOTS, RANKS, GATED, ONCE)                                                  \
    extern "C" __global__ void __launch_bounds__(ONCE ? 256 : 384, 1) WIDE_CLUSTER(RANKS)                         \
        linear_wide_##name(const __grid_constant__ pagemill::LinearWideParams p) {                                     \
        pagemill::linear_wide<pagemill::WideForm<pagemill::T, COLUMNS, SLOTS, RANKS, GATED, ONCE>>(p);             \
    }

#ifdef LINEAR_TUNE
#define V(COLUMNS, SLOTS, RANKS, GATED, ONCE)                                                                      \
    LINEAR_WIDE_KERNEL(n##COLUMNS##_##SLOTS##_c##RANKS##_##GATED##_##ONCE, Bf16, COLUMNS, SLOTS, RANKS, GATED, ONCE)
#include "bench/linear_wide_variants.inc"
#else
LINEAR_WIDE_KERNEL(bf16_gated, Bf16, 224, 3, 2, true, true)
#endif
