// y [1, N] = x [1, C] · W [N, C]^T with repacked weights (quant_formats.cuh), C a multiple of 256: a step of one
// sequence. Decides how one token fills the eight columns of the tensor cores' step; else as the small form of
// linear_quant.cu, whose letters these are.
//
// With one token, seven columns of eight would be for nothing, and every lane would scale its sums once a strip. So the
// columns are eight strips, two k tiles' worth: column g of x holds strip g, and for a strip's weights all other columns
// are zeros. A lane's sums then belong to two strips only, whose scales it applies once every 256 elements; the product
// with the constant that takes offsets away (linear_quant.cu) serves eight strips at once; and x is one load. That is
// half the instructions, which are what the small form waits for.
#include "quant_product.cuh"

namespace pagemill {

constexpr int ONE_WARPS = 8;
constexpr int COLUMNS = 2 * STRIPS; // strips at a time

/// Bytes of a thread block's shared memory: every warp's ring of S pairs of tiles, and the warps' sums twice
/// (`src/kernels/linear_quant.rs` counts the same).
template <class F, int S> constexpr size_t one_shared_bytes() {
    return size_t(ONE_WARPS) * (S * 4 * F::HALF_BYTES + 2 * TILE_ROWS * sizeof(float));
}

template <class F, int S, bool GATED> __device__ __forceinline__ void linear_quant_one(const QuantParams& p) {
    constexpr int OUT_ROWS = GATED ? HALF_ROWS : TILE_ROWS, TILE_BYTES = 2 * F::HALF_BYTES, PAIR_BYTES = 2 * TILE_BYTES;
    constexpr int PLANES = F::TWO_PLANES ? 2 : 1;
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    auto& partial = *reinterpret_cast<float(*)[2][ONE_WARPS][TILE_ROWS]>(shared_bytes);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const char* ring = reinterpret_cast<const char*>(shared_bytes) + sizeof(partial) + warp * (S * PAIR_BYTES);
    uint32_t row_tiles = (p.n + OUT_ROWS - 1) / OUT_ROWS;
    if constexpr (!GATED) {
#pragma unroll
        for (int i = 0; i < MORE_QUANT_PARTS; ++i) row_tiles += (p.more[i].n + OUT_ROWS - 1) / OUT_ROWS;
    }
    const uint32_t pairs = p.c / (2 * TILE_COLS);

    uint32_t load_row = static_cast<uint32_t>(warp) < pairs ? blockIdx.x : row_tiles, load_pair = warp, load_slot = 0, slot = 0;
    RowTile<F> source;
    auto locate = [&] {
        uint32_t tile = load_row;
        const QuantPart part = part_of<OUT_ROWS, GATED>(p, tile);
        source.template locate<GATED>(part, p.w_up, tile, 2 * pairs);
        source.skip(warp * PAIR_BYTES + lane * 16);
    };
    locate();
    const uint32_t ring_at = shared_address(ring) + lane * 16;
    auto request = [&] {
        if (load_row < row_tiles) {
            source.template request_from_here<GATED, 2>(ring_at + load_slot * PAIR_BYTES, lane);
            source.skip(ONE_WARPS * PAIR_BYTES);
            load_slot = load_slot + 1 == S ? 0 : load_slot + 1;
            load_pair += ONE_WARPS;
            if (load_pair >= pairs) load_pair = warp, load_row += gridDim.x, locate();
        }
        commit_copies();
    };
#pragma unroll
    for (int j = 0; j < S - 1; ++j) request();
    const uint32_t constant = in_register(F::CENTRE != 0 ? F::CENTRE : ONES), other[4] = {constant, constant, constant, constant};
    const Spread spread;
    const char* x_at = static_cast<const char*>(p.x) + g * (STRIP * 2);
    wait_for_previous_kernel();
    release_next_kernel();
    auto load_pair_x = [&](uint32_t pair) { return load_x<F>(x_at + static_cast<size_t>(pair) * (COLUMNS * STRIP * 2), c); };
    uint4 x = make_uint4(0, 0, 0, 0);
    if (static_cast<uint32_t>(warp) < pairs) x = load_pair_x(warp);

    int buffer = 0, turn = 0;
    for (uint32_t row_tile = blockIdx.x; row_tile < row_tiles; row_tile += gridDim.x) {
        float acc[4] = {};
        for (uint32_t pair = warp; pair < pairs; pair += ONE_WARPS) {
            request();
            await_copies<S - 1>();
            __syncwarp();
            const char* tiles = ring + slot * PAIR_BYTES;
            slot = slot + 1 == S ? 0 : slot + 1;
            const uint4 own = x;
            x = load_pair_x(pair + ONE_WARPS < pairs ? pair + ONE_WARPS : warp);
            float q[PLANES][2][4] = {}, s[2][4] = {}; // by plane and step of a strip
            {
                auto& offset = F::CENTRE != 0 ? q[PLANES - 1] : s;
                Bf16::mma(offset[0], other, own.x, own.y);
                Bf16::mma(offset[1], other, own.z, own.w);
            }
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                typename F::Raw raw;
                load_tile<F>(raw, tiles + t * TILE_BYTES, lane);
#pragma unroll
                for (int strip = 0; strip < STRIPS; ++strip) {
                    const bool mine = g == t * STRIPS + strip;
                    const uint32_t b[2][2] = {{mine ? own.x : 0, mine ? own.y : 0}, {mine ? own.z : 0, mine ? own.w : 0}};
#pragma unroll
                    for (int plane = 0; plane < PLANES; ++plane) {
                        uint32_t low[4], high[4];
                        F::pairs(low, raw, strip, 0, plane, spread);
                        F::pairs(high, raw, strip, 1, plane, spread);
#pragma unroll
                        for (int step = 0; step < 2; ++step) {
                            const uint32_t a[4] = {low[step * 2], high[step * 2], low[step * 2 + 1], high[step * 2 + 1]};
                            Bf16::mma(q[plane][step], a, b[step][0], b[step][1]);
                        }
                    }
                }
            }
            // Columns 2c and 2c + 1: two strips of tile c / 2.
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float d[2][F::GROUPS], m[2];
                F::two_scales(d, m, tiles + c / 2 * TILE_BYTES + h * F::HALF_BYTES, g, c % 2, spread);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& sum = acc[h * 2 + i];
                    auto in_planes = [&](int step) {
                        return PLANES == 2 ? fmaf(16.0f, q[PLANES - 1][step][h * 2 + i], q[0][step][h * 2 + i]) : q[0][step][h * 2 + i];
                    };
                    if constexpr (F::GROUPS == 2) {
                        sum = fmaf(d[i][0], in_planes(0), sum);
                        sum = fmaf(d[i][F::GROUPS - 1], in_planes(1), sum);
                    } else {
                        sum = fmaf(d[i][0], in_planes(0) + in_planes(1), sum);
                    }
                    if constexpr (F::CENTRE == 0) sum = fmaf(fmaf(-F::BIAS, d[i][0], m[i]), s[0][i] + s[1][i], sum);
                }
            }
            __syncwarp(); // the next request overwrites this slot
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float sum = acc[h * 2] + acc[h * 2 + 1];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if (c == 0) partial[buffer][warp][h * HALF_ROWS + g] = sum;
        }
        __syncthreads();
        // One warp adds up; the warps take turns.
        if (warp == turn && lane < OUT_ROWS) {
            uint32_t tile = row_tile;
            const QuantPart part = part_of<OUT_ROWS, GATED>(p, tile);
            const uint32_t row = tile * OUT_ROWS + lane;
            if (row < part.n) {
                float own = part.bias != nullptr ? part.bias[row] : 0.0f, up = 0.0f;
#pragma unroll
                for (int k = 0; k < ONE_WARPS; ++k) own += partial[buffer][k][lane];
                if constexpr (GATED) {
#pragma unroll
                    for (int k = 0; k < ONE_WARPS; ++k) up += partial[buffer][k][HALF_ROWS + lane];
                    own = gate_activation(own, p.activation) * up;
                }
                const float residual = p.residual != nullptr ? load_activation(p.residual, row, p.y_type) : 0.0f;
                store_activation(part.y, row, p.y_type, residual + own);
            }
        }
        buffer ^= 1;
        turn = turn + 1 == ONE_WARPS ? 0 : turn + 1;
    }
}

} // namespace pagemill

#define QUANT_ONE(name, F, S, GATED)                                                                                \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                            \
        linear_quant_##name(const __grid_constant__ pagemill::QuantParams p) {                                      \
        static_assert(pagemill::one_shared_bytes<pagemill::F, S>() <= 110 * 1024, "two thread blocks share a multiprocessor"); \
        pagemill::linear_quant_one<pagemill::F, S, GATED>(p);                                                       \
    }
// S: pairs of tiles in a warp's ring.
#define QUANT_ONE_KERNELS(name, F, S)                                                                               \
    QUANT_ONE(name##_m1, F, S, false)                                                                               \
    QUANT_ONE(gated_##name##_m1, F, S, true)
QUANT_ONE_KERNELS(q4_0, Q4_0, 5)
QUANT_ONE_KERNELS(q4_1, Q4_1, 5)
QUANT_ONE_KERNELS(q8_0, Q8_0, 3)
QUANT_ONE_KERNELS(q4_k, Q4_K, 5)
QUANT_ONE_KERNELS(q6_k, Q6_K, 4)
