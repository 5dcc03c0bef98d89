// y [T, N] = act(x [T, C] · gate [N, C]^T) * (x · up^T) for 129 tokens and more on Hopper, where the chip's power bounds
// products: a tile of 256 tokens by 112 features (224 columns) takes few bytes of L2 and of shared memory a product.
// Decides how a thread block brings weights and x; the host (`src/kernels/linear_wide.rs`) says when. Knows no layer.
//
// Letters: T tokens, N output features, C input features. A panel is 64 elements of C (one swizzled row of shared memory).
//
// Two thread blocks are a cluster: neighbouring tiles of features of the same tokens. Each brings half of the tokens of x
// for both (multicast) and its own weights. Neighbouring clusters have the same features and other tokens.
//
// Two warpgroups multiply and hold 64 tokens each, twice; of 192 tokens or less the second holds 64. Their sums are 224
// registers a thread, so that there is no room for a warpgroup that feeds: one of the threads does, while the first
// products of a panel are under way. One thread holds both sums of an output.
//
// Weights are asked for before waiting for the previous kernel, since they do not depend on it. A row's sums are in the
// order of C, whatever its place and company.
//
// Tried (NOTES.md): weights into L2 ahead (85 us became 124), other heights of tiles, a warpgroup that feeds.
#include "cluster.cuh"
#include "cluster_barriers.cuh"
#include "warpgroup_n224.cuh"

namespace pagemill {

struct LinearWideParams {
    CUtensorMap x_map;        // [T, C], boxes of 64 columns and x_rows
    CUtensorMap w_map[2];     // gate, up [N, C], boxes of 64 columns and 112 rows
    void* y;                  // [T, N] elements of y_type
    uint32_t n;               // a multiple of 8
    uint32_t num_tokens;
    uint32_t num_token_tiles;
    uint32_t x_rows;          // of a tile that each of a cluster brings: a multiple of 8, at most 128
    uint32_t num_panels;      // of C
    uint32_t y_type;          // ActivationType: F32 or BF16
    uint32_t activation;      // GateActivation
    uint32_t unused[23];      // up to a multiple of 128 bytes, which some toolkits align a map to
};
static_assert(sizeof(LinearWideParams) == 512, "src/kernels/linear_wide.rs has the same");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

constexpr int WIDE_TOKENS = 256, WIDE_FEATURES = 112, WIDE_COLUMNS = 2 * WIDE_FEATURES;
constexpr int WIDE_RANKS = 2, WIDE_SLOTS = 3, WIDE_WARPS = 8;
constexpr int X_BYTES = WIDE_TOKENS * 128, W_BYTES = WIDE_COLUMNS * 128; // of a panel
constexpr int STAGED_BYTES = 128;                                       // of a token: outputs leave through shared memory
constexpr int STAGED_STRIDE = STAGED_BYTES + 16;                        // rows meet no bank twice
static_assert(WIDE_COLUMNS == 224, "there is a body for it");
static_assert(WIDE_FEATURES % 8 == 0, "up's box begins where the swizzle does");

struct WideShared {
    alignas(1024) unsigned char x[WIDE_SLOTS][X_BYTES];
    alignas(1024) unsigned char w[WIDE_SLOTS][W_BYTES];
    alignas(16) unsigned char staged[WIDE_WARPS][16 * STAGED_STRIDE];
    uint64_t full[WIDE_SLOTS], w_empty[WIDE_SLOTS], x_empty[WIDE_SLOTS];
};
static_assert(sizeof(WideShared) <= 227 << 10, "a multiprocessor has no more");

/// Where a thread block's tile begins.
struct WideTile {
    uint32_t token, feature;
    /// The last tile of tokens ends where they do: boxes that reach beyond take long. What two tiles have, both store.
    __device__ __forceinline__ static WideTile of(const LinearWideParams& p) {
        const uint32_t cluster = blockIdx.x / WIDE_RANKS, last = p.num_tokens > WIDE_TOKENS ? p.num_tokens - WIDE_TOKENS : 0;
        return {min(cluster % p.num_token_tiles * WIDE_TOKENS, last), (cluster / p.num_token_tiles * WIDE_RANKS + blockIdx.x % WIDE_RANKS) * WIDE_FEATURES};
    }
};

/// A box of the tensor map to the same place in both thread blocks' shared memory; the barrier of each counts its.
__device__ __forceinline__ void copy_box_to_both(void* to, const CUtensorMap* map, int column, int row, uint64_t* bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(shared_address(to)), "l"(map), "r"(column), "r"(row), "r"(shared_address(bar)), "h"(uint16_t(3)) : "memory");
}

/// A panel of the tile's weights to a slot. One thread.
__device__ __forceinline__ void bring_w(WideShared& sh, const LinearWideParams& p, const WideTile& tile, int panel, int slot) {
    barrier_expect(&sh.full[slot], W_BYTES);
    copy_box(sh.w[slot], &p.w_map[0], panel * 64, tile.feature, &sh.full[slot]);
    copy_box(sh.w[slot] + W_BYTES / 2, &p.w_map[1], panel * 64, tile.feature, &sh.full[slot]);
}
/// This thread block's share of a panel of x to a slot of both. One thread.
__device__ __forceinline__ void bring_x(WideShared& sh, const LinearWideParams& p, const WideTile& tile, int panel, int slot) {
    const uint32_t first = blockIdx.x % WIDE_RANKS * p.x_rows;
    barrier_expect(&sh.full[slot], WIDE_RANKS * p.x_rows * 128);
    copy_box_to_both(sh.x[slot] + first * 128, &p.x_map, panel * 64, tile.token + first, &sh.full[slot]);
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

/// Staged outputs of a warp's 16 tokens to y: `COUNT` pieces of 16 bytes of each, from feature `first` on.
template <int COUNT, int BYTES>
__device__ __forceinline__ void store_staged(const unsigned char* staged, const LinearWideParams& p, uint32_t token, uint32_t first) {
    unsigned char* y = static_cast<unsigned char*>(p.y);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < (16 * COUNT + 31) / 32; ++i) {
        const uint32_t piece = threadIdx.x % 32 + i * 32, row = piece / COUNT, block = piece % COUNT, feature = first + block * (16 / BYTES);
        if (piece < 16 * COUNT && token + row < p.num_tokens && feature < p.n)
            *reinterpret_cast<uint4*>(y + (size_t(token + row) * p.n + feature) * BYTES) = *reinterpret_cast<const uint4*>(staged + row * STAGED_STRIDE + block * 16);
    }
    __syncwarp();
}

/// Outputs `BLOCK` to `BLOCK + COUNT` (of 8 features each, in fragments) of a warp's 16 tokens as f32; at most 4.
template <int BLOCK, int COUNT>
__device__ __forceinline__ void store_f32(unsigned char* staged, const LinearWideParams& p, uint32_t token, uint32_t feature, const float (&y)[WIDE_FEATURES / 2]) {
    unsigned char* to = staged + threadIdx.x % 32 / 4 * STAGED_STRIDE + threadIdx.x % 4 * 8;
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
        const float* v = &y[(BLOCK + j) * 4];
        *reinterpret_cast<float2*>(to + j * 32) = make_float2(v[0], v[1]);
        *reinterpret_cast<float2*>(to + 8 * STAGED_STRIDE + j * 32) = make_float2(v[2], v[3]);
    }
    store_staged<COUNT * 2, 4>(staged, p, token, feature + BLOCK * 8);
}
/// The same as bf16; at most 8, an even number of them.
template <int BLOCK, int COUNT>
__device__ __forceinline__ void store_bf16(unsigned char* staged, const LinearWideParams& p, uint32_t token, uint32_t feature, const float (&y)[WIDE_FEATURES / 2]) {
    const uint32_t lane = threadIdx.x % 32, to = shared_address(staged) + lane % 16 * STAGED_STRIDE + lane / 16 * 16;
#pragma unroll
    for (int j = 0; j < COUNT; j += 2) {
        const float* v = &y[(BLOCK + j) * 4];
        store_matrices(to + j * 16, Bf16::pack(v[0], v[1]), Bf16::pack(v[2], v[3]), Bf16::pack(v[4], v[5]), Bf16::pack(v[6], v[7]));
    }
    store_staged<COUNT, 2>(staged, p, token, feature + BLOCK * 8);
}

/// A warpgroup's outputs for 64 tokens from `token` on, of sums `d` of gate and up.
__device__ __forceinline__ void store_outputs(WideShared& sh, const LinearWideParams& p, uint32_t token, uint32_t feature, const float (&d)[WIDE_COLUMNS / 2]) {
    static_assert(WIDE_FEATURES == 112, "stored as 8 + 6 blocks of bf16, 4 + 4 + 4 + 2 of f32");
    unsigned char* staged = sh.staged[threadIdx.x / 32];
    float y[WIDE_FEATURES / 2];
#pragma unroll
    for (int i = 0; i < WIDE_FEATURES / 2; ++i) y[i] = gated(d[i], d[WIDE_FEATURES / 2 + i], p.activation);
    token += threadIdx.x / 32 % 4 * 16;
    if (p.y_type == ACT_F32) {
        store_f32<0, 4>(staged, p, token, feature, y), store_f32<4, 4>(staged, p, token, feature, y);
        store_f32<8, 4>(staged, p, token, feature, y), store_f32<12, 2>(staged, p, token, feature, y);
    } else {
        store_bf16<0, 8>(staged, p, token, feature, y), store_bf16<8, 6>(staged, p, token, feature, y);
    }
}

/// A warpgroup: 64 tokens of the tile, and where `BLOCKS` is 2 those 128 further on. The thread that `feeds` brings what
/// comes next to a slot that both warpgroups, and for x both thread blocks, have done with.
template <class T, int BLOCKS> __device__ __forceinline__ void multiply(WideShared& sh, const LinearWideParams& p, const WideTile& tile, bool feeds) {
    constexpr uint32_t K_STEP = 32 >> 4, NEXT_BLOCK = 128 * 128 >> 4; // of a descriptor's low word
    const uint32_t warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
    const uint32_t first_x = descriptor_word(shared_address(sh.x)) + warpgroup * (64 * 128 >> 4), first_w = descriptor_word(shared_address(sh.w));
    // Lanes tell both thread blocks, one each, that a slot of x is free; the first tells this one that weights are.
    const uint32_t x_empty = address_at(sh.x_empty, lane % WIDE_RANKS);
    float d[BLOCKS][WIDE_COLUMNS / 2];
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int i = 0; i < WIDE_COLUMNS / 2; ++i) d[block][i] = 0;
        wgmma_pin(d[block]);
    }
    int slot = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int panel = 0; panel < int(p.num_panels); ++panel) {
        barrier_wait(&sh.full[slot], parity);
        const uint32_t x = first_x + slot * (X_BYTES >> 4), w = first_w + slot * (W_BYTES >> 4);
        auto multiply_step = [&](int k) {
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) wgmma_n224_add<T>(d[block], x + block * NEXT_BLOCK + k * K_STEP, w + k * K_STEP);
            wgmma_commit();
        };
        wgmma_fence();
        multiply_step(0);
        // The panel before is done; this one's first products are under way while its slot is given back and filled.
        wgmma_wait<1>();
        if (panel > 0) {
            const int last = slot == 0 ? WIDE_SLOTS - 1 : slot - 1, next = panel - 1 + WIDE_SLOTS;
            if (lane < WIDE_RANKS) barrier_arrive_at(x_empty + last * 8);
            if (lane == 0) barrier_arrive(&sh.w_empty[last]);
            if (feeds && next < int(p.num_panels)) {
                const uint32_t turn = slot == 0 ? parity ^ 1 : parity; // that the slot was in
                barrier_wait(&sh.w_empty[last], turn);
                bring_w(sh, p, tile, next, last);
                barrier_wait_for_cluster(&sh.x_empty[last], turn);
                bring_x(sh, p, tile, next, last);
            }
        }
        __syncwarp();
        wgmma_fence();
        multiply_step(1), multiply_step(2), multiply_step(3);
        if (++slot == WIDE_SLOTS) slot = 0, parity ^= 1;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) wgmma_pin(d[block]);
    // Behind N lie no rows: boxes of zeros, and nothing is stored.
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) store_outputs(sh, p, tile.token + warpgroup * 64 + block * 128, tile.feature, d[block]);
}

template <class T> __device__ __forceinline__ void linear_wide(const LinearWideParams& p) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    auto& sh = *reinterpret_cast<WideShared*>(shared_bytes);
    if (threadIdx.x == 0) {
        for (int i = 0; i < WIDE_SLOTS; ++i) {
            barrier_init(&sh.full[i], 2); // weights, x
            barrier_init(&sh.w_empty[i], WIDE_WARPS), barrier_init(&sh.x_empty[i], WIDE_RANKS * WIDE_WARPS);
        }
    }
    __syncwarp();
    announce_to_cluster();
    await_cluster();
    const WideTile tile = WideTile::of(p);
    // Of the warpgroup that has less to do.
    const bool feeds = threadIdx.x == (WIDE_WARPS - 1) * 32;
    if (feeds) {
        for (int i = 0; i < min(int(p.num_panels), WIDE_SLOTS); ++i) bring_w(sh, p, tile, i, i);
        wait_for_previous_kernel();
        for (int i = 0; i < min(int(p.num_panels), WIDE_SLOTS); ++i) bring_x(sh, p, tile, i, i);
    }
    __syncwarp();
    wait_for_previous_kernel();
    release_next_kernel();
    if (tile.token + threadIdx.x / 128 * 64 + 128 < p.num_tokens) multiply<T, 2>(sh, p, tile, feeds);
    else multiply<T, 1>(sh, p, tile, feeds);
    // The other may still bring its share of this one's x, or tell it of slots.
    cluster_arrive();
    cluster_wait();
}

#else

template <class T> __device__ __forceinline__ void linear_wide(const LinearWideParams&) {}

#endif

} // namespace pagemill

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define WIDE_CLUSTER __cluster_dims__(2, 1, 1)
#else
#define WIDE_CLUSTER
#endif
#define LINEAR_WIDE_KERNEL(name, T)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256, 1) WIDE_CLUSTER linear_wide_##name(                              \
        const __grid_constant__ pagemill::LinearWideParams p) {                                                        \
        pagemill::linear_wide<pagemill::T>(p);                                                                         \
    }
LINEAR_WIDE_KERNEL(bf16, Bf16)
LINEAR_WIDE_KERNEL(f16, F16)
