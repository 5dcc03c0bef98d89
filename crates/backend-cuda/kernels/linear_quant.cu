// y [M, N] = x [M, C] · W [N, C]^T with W in GGUF blocks (Q4_0, Q4_1, Q8_0, Q4_K, Q6_K), repacked at load
// (quant_formats.cuh). Decides how the weights meet x in the tensor cores and how thread blocks share rows; the host
// (`src/kernels/linear_quant.rs`) picks the variant. Knows no layer.
//
// Letters: M tokens, N output features, C input features. A strip is 32 elements of C, a k tile four strips.
//
// A nibble n becomes the bf16 number 128 + n by one mask and one or (the mantissa's lowest bit weighs 1 there),
// which is exact. Up to 16 tokens nothing is multiplied out before the product: the tensor cores sum
// t = Σ (128 + n) x over a strip, and a second product with a constant takes the offset away (or, with ones, gives
// s = Σ x for the formats with minima); scale and minimum are applied to the sums, in f32, so that rounding happens
// in x alone. Q8_0 is two nibbles, Q6_K has six bits in one number and takes its scale every 16 elements. Warps
// share a row tile by cutting C, as in linear_small.cu. One token has linear_quant_one.cu.
//
// Above, 32 or 64 tokens by 64 rows a thread block, x staged through shared memory: there the weights are multiplied
// out to bf16 once for all tokens, which rounds each of them, as a dequantised matrix would be. Where that makes so few
// thread blocks that twice as many run at once, 32 rows, and C cut in four instead of two.
//
// The gated form makes each tile of a half of the gate's and the same half of up's: both sums of an output meet in one
// place. Up to three products of one x (q, k, v) with weights of one format share a launch.
#include "quant_product.cuh"

namespace pagemill {

/// One strip of 16 rows times MT * 8 tokens, added to `acc`; `other` is four times CENTRE, or ones.
template <class F, int MT>
__device__ __forceinline__ void strip_product(float (&acc)[MT][4], const typename F::Raw& r, int strip, const uint4 (&x)[MT], const Spread& spread,
                                              const uint32_t (&other)[4]) {
    constexpr int PLANES = F::TWO_PLANES ? 2 : 1;
    uint32_t a[PLANES][2][4];
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane) {
        uint32_t low[4], high[4];
        F::pairs(low, r, strip, 0, plane, spread);
        F::pairs(high, r, strip, 1, plane, spread);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            a[plane][step][0] = low[step * 2], a[plane][step][1] = high[step * 2];
            a[plane][step][2] = low[step * 2 + 1], a[plane][step][3] = high[step * 2 + 1];
        }
    }
#pragma unroll
    for (int group = 0; group < F::GROUPS; ++group) {
        float d[2], e[2]; // of w = d q + e
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float m;
            F::scale(r, strip, group, h, d[h], m, spread);
            e[h] = fmaf(-F::BIAS, d[h], m);
        }
#pragma unroll
        for (int t = 0; t < MT; ++t) {
            float q[PLANES][4] = {}, s[4] = {};
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                if (F::GROUPS == 2 && step != group) continue;
                const uint32_t b0 = step == 0 ? x[t].x : x[t].z, b1 = step == 0 ? x[t].y : x[t].w;
                Bf16::mma(F::CENTRE != 0 ? q[PLANES - 1] : s, other, b0, b1);
#pragma unroll
                for (int plane = 0; plane < PLANES; ++plane) Bf16::mma(q[plane], a[plane][step], b0, b1);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float sum = PLANES == 2 ? fmaf(16.0f, q[PLANES - 1][i], q[0][i]) : q[0][i];
                acc[t][i] = fmaf(d[i / 2], sum, acc[t][i]);
                if constexpr (F::CENTRE == 0) acc[t][i] = fmaf(e[i / 2], s[i % 2], acc[t][i]);
            }
        }
    }
}

/// Bytes of a thread block's shared memory: every warp's ring of tiles, and its sums twice
/// (`src/kernels/linear_quant.rs` counts the same).
template <class F, int MT, int S, int WARPS> constexpr size_t small_shared_bytes() { return size_t(WARPS) * (S * 2 * F::HALF_BYTES + 2 * MT * 512); }

// Tiles go through shared memory because a register pipeline does not survive the compiler: loads of several tiles
// share a scoreboard, and waiting for the oldest waits for all. Counted groups of copies do not.
template <class F, int MT, int S, int WARPS, bool GATED> __device__ __forceinline__ void linear_quant_small(const QuantParams& p) {
    constexpr int OUT_ROWS = GATED ? HALF_ROWS : TILE_ROWS, SUMS = MT * 128, TILE_BYTES = 2 * F::HALF_BYTES;
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    auto& partial = *reinterpret_cast<float(*)[2][WARPS][SUMS]>(shared_bytes);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const char* ring = reinterpret_cast<const char*>(shared_bytes) + sizeof(partial) + warp * (S * TILE_BYTES);
    uint32_t row_tiles = (p.n + OUT_ROWS - 1) / OUT_ROWS;
    if constexpr (!GATED) {
#pragma unroll
        for (int i = 0; i < MORE_QUANT_PARTS; ++i) row_tiles += (p.more[i].n + OUT_ROWS - 1) / OUT_ROWS;
    }
    const uint32_t k_tiles = (p.c + TILE_COLS - 1) / TILE_COLS, strips = p.c / STRIP;
    // Columns behind the last token repeat it, and strips behind C repeat the last one at scale 0.
    const char* x_row[MT];
#pragma unroll
    for (int t = 0; t < MT; ++t) x_row[t] = static_cast<const char*>(p.x) + static_cast<size_t>(min(t * 8 + g, p.m - 1)) * p.x_stride * 2;

    uint32_t load_row = static_cast<uint32_t>(warp) < k_tiles ? blockIdx.x : row_tiles, load_k = warp, load_slot = 0, slot = 0;
    RowTile<F> source;
    auto locate = [&] {
        uint32_t tile = load_row;
        const QuantPart part = part_of<OUT_ROWS, GATED>(p, tile);
        source.template locate<GATED>(part, p.w_up, tile, k_tiles);
        source.skip(warp * TILE_BYTES + lane * 16);
    };
    locate();
    const uint32_t ring_at = shared_address(ring) + lane * 16;
    auto request = [&] {
        if (load_row < row_tiles) {
            source.template request_from_here<GATED, 1>(ring_at + load_slot * TILE_BYTES, lane);
            source.skip(WARPS * TILE_BYTES);
            load_slot = load_slot + 1 == S ? 0 : load_slot + 1;
            load_k += WARPS;
            if (load_k >= k_tiles) load_k = warp, load_row += gridDim.x, locate();
        }
        commit_copies();
    };
#pragma unroll
    for (int j = 0; j < S - 1; ++j) request();
    const uint32_t constant = in_register(F::CENTRE != 0 ? F::CENTRE : ONES), other[4] = {constant, constant, constant, constant};
    const Spread spread;
    uint4 x[4][MT];
    auto load_strip_x = [&](int strip, uint32_t k) {
        const size_t at = static_cast<size_t>(min(k * 4 + strip, strips - 1)) * 64;
#pragma unroll
        for (int t = 0; t < MT; ++t) x[strip][t] = load_x<F>(x_row[t] + at, c);
    };
    wait_for_previous_kernel();
    release_next_kernel();
#pragma unroll
    for (int strip = 0; strip < 4; ++strip) load_strip_x(strip, warp);

    float acc[MT][4] = {};
    int buffer = 0;
    uint32_t row_tile = blockIdx.x;
    auto finish = [&] {
#pragma unroll
        for (int t = 0; t < MT; ++t) {
            *reinterpret_cast<float4*>(&partial[buffer][warp][t * 128 + lane * 4]) = make_float4(acc[t][0], acc[t][1], acc[t][2], acc[t][3]);
            acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0.0f;
        }
        __syncthreads();
        constexpr int OUTPUTS = GATED ? SUMS / 2 : SUMS;
        uint32_t tile = row_tile;
        const QuantPart part = part_of<OUT_ROWS, GATED>(p, tile);
        for (int o = threadIdx.x; o < OUTPUTS; o += WARPS * 32) {
            const int i = GATED ? o / 2 * 4 + o % 2 : o, at = i / 4 % 32, reg = i % 4;
            const uint32_t token = i / 128 * 8 + at % 4 * 2 + reg % 2, row = tile * OUT_ROWS + at / 4 + reg / 2 * 8;
            if (token >= p.m || row >= part.n) continue;
            const size_t y_at = static_cast<size_t>(token) * part.y_stride + row;
            const float residual = p.residual != nullptr ? load_activation(p.residual, y_at, p.y_type) : 0.0f;
            float own = part.bias != nullptr ? part.bias[row] : 0.0f, up = 0.0f;
#pragma unroll
            for (int k = 0; k < WARPS; ++k) own += partial[buffer][k][i];
            if constexpr (GATED) {
#pragma unroll
                for (int k = 0; k < WARPS; ++k) up += partial[buffer][k][i + 2];
                own = gate_activation(own, p.activation) * up;
            }
            store_activation(part.y, y_at, p.y_type, residual + own);
        }
        buffer ^= 1;
    };
    for (; row_tile < row_tiles; row_tile += gridDim.x) {
        for (uint32_t k_tile = warp; k_tile < k_tiles; k_tile += WARPS) {
            request();
            await_copies<S - 1>();
            __syncwarp();
            typename F::Raw raw;
            load_tile<F>(raw, ring + slot * TILE_BYTES, lane);
            slot = slot + 1 == S ? 0 : slot + 1;
            const uint32_t next_k = k_tile + WARPS < k_tiles ? k_tile + WARPS : warp;
#pragma unroll
            for (int strip = 0; strip < 4; ++strip) {
                strip_product<F, MT>(acc, raw, strip, x[strip], spread, other);
                load_strip_x(strip, next_k);
            }
            __syncwarp(); // the next request overwrites this slot
        }
        finish();
    }
}

// ---- 32 or 64 tokens by 64 rows (narrow: by 32) ------------------------------------------------------------------

/// How a thread block of eight warps takes rows, C and tokens: warps of one k group have 16 rows each, and k groups take
/// k tiles in turn. `STAGES` k tiles of x and of weights are on their way for each.
template <int TOKENS_, int ROW_WARPS_, int STAGES_> struct Cut {
    static constexpr int TOKENS = TOKENS_, ROW_WARPS = ROW_WARPS_, K_GROUPS = 8 / ROW_WARPS, STAGES = STAGES_;
};
constexpr int X_ROW_BYTES = TILE_COLS * 2;

/// Bytes of a thread block's shared memory: for each k group its stages of x, for each warp its stages of tiles
/// (`src/kernels/linear_quant.rs` counts the same).
template <class F, class B> constexpr size_t medium_shared_bytes() {
    return size_t(B::K_GROUPS) * B::STAGES * (B::TOKENS * X_ROW_BYTES + B::ROW_WARPS * 2 * F::HALF_BYTES);
}

/// The four words of a strip's row half as bf16 weights.
template <class F> __device__ __forceinline__ void multiply_out(uint32_t (&words)[4], const typename F::Raw& r, int strip, int h, const Spread& spread) {
    uint32_t pair[4], top[4];
    F::pairs(pair, r, strip, h, 0, spread);
    if constexpr (F::TWO_PLANES) F::pairs(top, r, strip, h, 1, spread);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float d, m;
        F::scale(r, strip, F::GROUPS == 2 ? i / 2 : 0, h, d, m, spread);
        const float e = fmaf(-F::BIAS, d, m);
        float low = Bf16::low(pair[i]), high = Bf16::high(pair[i]);
        if constexpr (F::TWO_PLANES) low = fmaf(16.0f, Bf16::low(top[i]), low), high = fmaf(16.0f, Bf16::high(top[i]), high);
        words[i] = Bf16::pack(fmaf(d, low, e), fmaf(d, high, e));
    }
}

template <class F, class B, bool GATED> __device__ __forceinline__ void linear_quant_medium(const QuantParams& p) {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    constexpr int TILE_TOKENS = B::TOKENS, ROW_WARPS = B::ROW_WARPS, K_GROUPS = B::K_GROUPS, X_STAGES = B::STAGES;
    constexpr int X_STAGE_BYTES = TILE_TOKENS * X_ROW_BYTES;
    constexpr int MT = TILE_TOKENS / 8, OUT_ROWS = GATED ? HALF_ROWS : TILE_ROWS, TILE_BYTES = 2 * F::HALF_BYTES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int row_warp = warp % ROW_WARPS, k_group = warp / ROW_WARPS, group_thread = threadIdx.x % (ROW_WARPS * 32);
    uint32_t row_block = blockIdx.x; // in its part
    const QuantPart part = part_of<ROW_WARPS * OUT_ROWS, GATED>(p, row_block);
    const uint32_t row_tiles = (part.n + OUT_ROWS - 1) / OUT_ROWS, k_tiles = (p.c + TILE_COLS - 1) / TILE_COLS;
    const uint32_t row_tile = row_block * ROW_WARPS + row_warp, token0 = blockIdx.y * TILE_TOKENS;
    const uint32_t steps = (k_tiles - k_group + K_GROUPS - 1) / K_GROUPS; // of this k group: k tiles k_group, k_group + K_GROUPS ...
    unsigned char* x_stages = shared_bytes + k_group * X_STAGES * X_STAGE_BYTES;
    RowTile<F> source;
    source.template locate<GATED>(part, p.w_up, min(row_tile, row_tiles - 1), k_tiles);

    const char* tiles = reinterpret_cast<const char*>(shared_bytes) + K_GROUPS * X_STAGES * X_STAGE_BYTES + warp * (X_STAGES * TILE_BYTES);
    auto request_w = [&](uint32_t step) {
        if (step < steps) source.template request<GATED>(shared_address(tiles) + step % X_STAGES * TILE_BYTES, step * K_GROUPS + k_group, lane);
    };
    auto request_x = [&](uint32_t step) {
        // Odd rows have the halves of each 128 bytes exchanged, so that two rows read together share no bank.
        if (step >= steps) return;
        const uint32_t k_tile = step * K_GROUPS + k_group, to = shared_address(x_stages + step % X_STAGES * X_STAGE_BYTES);
#pragma unroll
        for (int i = 0; i < TILE_TOKENS * 16 / (ROW_WARPS * 32); ++i) {
            const uint32_t row = group_thread / 16 + i * (ROW_WARPS * 2), chunk = group_thread % 16, k = k_tile * 128 + chunk * 8;
            const bool wanted = token0 + row < p.m && k < p.c;
            const char* from = static_cast<const char*>(p.x) + (wanted ? (static_cast<size_t>(token0 + row) * p.x_stride + k) * 2 : 0);
            copy16_async(to + row * X_ROW_BYTES + (chunk ^ (row % 2 * 4)) * 16, from, wanted);
        }
    };
    const Spread spread;
    // Weights first: they do not depend on the previous kernel. They all belong to the first group of copies.
#pragma unroll
    for (int step = 0; step < X_STAGES - 1; ++step) request_w(step);
    wait_for_previous_kernel();
    release_next_kernel();
#pragma unroll
    for (int step = 0; step < X_STAGES - 1; ++step) {
        request_x(step);
        commit_copies();
    }

    float acc[MT][4] = {};
    for (uint32_t step = 0; step < steps; ++step) {
        await_copies<X_STAGES - 2>();
        asm volatile("bar.sync %0, %1;" ::"r"(1 + k_group), "n"(ROW_WARPS * 32) : "memory");
        request_x(step + X_STAGES - 1);
        request_w(step + X_STAGES - 1);
        commit_copies();
        typename F::Raw raw;
        load_tile<F>(raw, tiles + step % X_STAGES * TILE_BYTES, lane);
        const unsigned char* x_stage = x_stages + step % X_STAGES * X_STAGE_BYTES + g * X_ROW_BYTES;
#pragma unroll
        for (int strip = 0; strip < 4; ++strip) {
            uint32_t low[4], high[4];
            multiply_out<F>(low, raw, strip, 0, spread);
            multiply_out<F>(high, raw, strip, 1, spread);
            const uint32_t a0[4] = {low[0], high[0], low[1], high[1]}, a1[4] = {low[2], high[2], low[3], high[3]};
#pragma unroll
            for (int t = 0; t < MT; ++t) {
                const unsigned char* at = x_stage + t * 8 * X_ROW_BYTES + (strip ^ (g & 1)) * 64;
                uint2 x0, x1;
                if constexpr (F::GROUPS == 1) {
                    const uint4 x = *reinterpret_cast<const uint4*>(at + c * 16);
                    x0 = make_uint2(x.x, x.y), x1 = make_uint2(x.z, x.w);
                } else {
                    x0 = *reinterpret_cast<const uint2*>(at + c * 8), x1 = *reinterpret_cast<const uint2*>(at + 32 + c * 8);
                }
                Bf16::mma(acc[t], a0, x0.x, x0.y);
                Bf16::mma(acc[t], a1, x1.x, x1.y);
            }
        }
    }
    await_copies<0>();
    __syncthreads();
    // The other k groups' sums pass through shared memory to the first, which adds them in order.
    float* sums = reinterpret_cast<float*>(shared_bytes) + row_warp * MT * 128 + lane * 4;
    constexpr int GROUP_SUMS = ROW_WARPS * MT * 128;
    if (k_group != 0) {
#pragma unroll
        for (int t = 0; t < MT; ++t)
            *reinterpret_cast<float4*>(sums + (k_group - 1) * GROUP_SUMS + t * 128) = make_float4(acc[t][0], acc[t][1], acc[t][2], acc[t][3]);
    }
    __syncthreads();
    if (k_group != 0 || row_tile >= row_tiles) return;
#pragma unroll
    for (int t = 0; t < MT; ++t) {
#pragma unroll
        for (int other = 0; other < K_GROUPS - 1; ++other) {
            const float4 more = *reinterpret_cast<const float4*>(sums + other * GROUP_SUMS + t * 128);
            acc[t][0] += more.x, acc[t][1] += more.y, acc[t][2] += more.z, acc[t][3] += more.w;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (GATED && i >= 2) break;
            const uint32_t token = token0 + t * 8 + 2 * c + i % 2, row = row_tile * OUT_ROWS + g + i / 2 * 8;
            if (token >= p.m || row >= part.n) continue;
            const size_t y_at = static_cast<size_t>(token) * part.y_stride + row;
            float own = acc[t][i] + (part.bias != nullptr ? part.bias[row] : 0.0f);
            if (GATED) own = gate_activation(own, p.activation) * acc[t][i % 2 + 2];
            if (p.residual != nullptr) own += load_activation(p.residual, y_at, p.y_type);
            store_activation(part.y, y_at, p.y_type, own);
        }
    }
}

} // namespace pagemill

constexpr int SMALL_BLOCKS = 2; // thread blocks of the small form on a multiprocessor

#define QUANT_SMALL(name, F, MT, S, GATED)                                                                          \
    extern "C" __global__ void __launch_bounds__(256, SMALL_BLOCKS)                                                 \
        linear_quant_##name(const __grid_constant__ pagemill::QuantParams p) {                                      \
        pagemill::linear_quant_small<pagemill::F, MT, S, 8, GATED>(p);                                              \
    }
#define QUANT_MEDIUM(name, F, BLOCKS, GATED, ...)                                                                   \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS)                                                       \
        linear_quant_##name(const __grid_constant__ pagemill::QuantParams p) {                                      \
        static_assert(BLOCKS * pagemill::medium_shared_bytes<pagemill::F, __VA_ARGS__>() <= 226 * 1024, "too much shared memory"); \
        pagemill::linear_quant_medium<pagemill::F, __VA_ARGS__, GATED>(p);                                          \
    }
// S: tiles in a warp's ring; N: stages of the narrow form for 64 tokens.
#define QUANT_KERNELS(name, F, S, N)                                                                                \
    QUANT_SMALL(name##_m8, F, 1, S, false)                                                                          \
    QUANT_SMALL(name##_m16, F, 2, S, false)                                                                         \
    QUANT_SMALL(gated_##name##_m8, F, 1, S, true)                                                                   \
    QUANT_SMALL(gated_##name##_m16, F, 2, S, true)                                                                  \
    QUANT_MEDIUM(name##_m32, F, 2, false, pagemill::Cut<32, 4, 3>)                                                  \
    QUANT_MEDIUM(gated_##name##_m32, F, 2, true, pagemill::Cut<32, 4, 3>)                                           \
    QUANT_MEDIUM(name##_m32_narrow, F, 1, false, pagemill::Cut<32, 2, 3>)                                           \
    QUANT_MEDIUM(name##_m64, F, 1, false, pagemill::Cut<64, 4, 4>)                                                  \
    QUANT_MEDIUM(gated_##name##_m64, F, 1, true, pagemill::Cut<64, 4, 4>)                                           \
    QUANT_MEDIUM(name##_m64_narrow, F, 1, false, pagemill::Cut<64, 2, N>)
QUANT_KERNELS(q4_0, Q4_0, 8, 3)
QUANT_KERNELS(q4_1, Q4_1, 8, 3)
QUANT_KERNELS(q8_0, Q8_0, 5, 2)
QUANT_KERNELS(q4_k, Q4_K, 8, 3)
QUANT_KERNELS(q6_k, Q6_K, 5, 2)
