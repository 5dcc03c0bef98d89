// y [M, N] = x [M, C] · W [N, C]^T for M up to 16: reads every weight once, near memory bandwidth.
// Decides how weights reach the tensor cores and how the thread blocks share rows; the host
// (`src/kernels/linear_small.rs`) picks the variant. Knows no layer.
//
// Letters: M tokens, N output features, C input features. A strip is 32 elements of C (fragments.cuh).
// W is the A operand, 16 rows a tile, taken from memory 16 bytes a lane; x is the B operand, one column a
// token. The warps of a thread block share a tile by cutting C into chunks of S strips, and add their sums in
// shared memory at the tile's end. Each strip's registers are refilled with the warp's next chunk (of the next
// tile too) as soon as they are consumed, so S KB stay in flight for each 16 rows of a warp; the first chunk is
// asked for before waiting for the previous kernel, since weights do not depend on it.
//
// The gated form takes rows g of a tile from the gate and rows g + 8 from the up projection: both sums of an
// output meet in one place, and act(gate) * up costs nothing.
// Up to three products of one x (q, k, v) share a launch: their tiles follow each other, so that small ones do not
// leave multiprocessors idle. The order of additions depends on the variant only, not on M within it, nor on what
// else is in the launch.
#include "fragments.cuh"

namespace pagemill {

constexpr int MORE_PARTS = 2;

/// A further product of the same x, of the same types.
struct LinearPart {
    const void* w;     // [N, C]
    const float* bias; // [N] or null
    void* y;           // [M, y_stride]
    uint32_t n;        // 0: there is none, and none after it
    uint32_t y_stride;
};

struct LinearParams {
    const void* x;        // [M, x_stride] elements of the weight's type
    const void* w;        // [N, C]; gated: the gate's rows
    const void* w_up;     // gated: [N, C] rows of up; else null
    const float* bias;    // [N] or null (not gated)
    const void* residual; // [M, y_stride] elements of y_type, added, or null (with more parts: null); may be y
    void* y;              // [M, y_stride] elements of y_type
    uint32_t m;           // 1 ..= 8 * MT
    uint32_t n;
    uint32_t c;           // multiple of 32
    uint32_t x_stride;
    uint32_t y_stride;
    uint32_t y_type;      // ActivationType
    uint32_t activation;  // GateActivation
    LinearPart more[MORE_PARTS]; // not in the gated form
};
static_assert(sizeof(LinearPart) == 32 && sizeof(LinearParams) == 144, "src/kernels/linear_small.rs has the same");

/// The part that `tile` belongs to, and in `tile` its number there. Behind the last tile: the last part, and a number
/// behind its tiles.
template <int OUT_ROWS, bool GATED>
__device__ __forceinline__ LinearPart part_of(const LinearParams& p, uint32_t& tile) {
    LinearPart part = {p.w, p.bias, p.y, p.n, p.y_stride};
    if constexpr (!GATED) {
#pragma unroll
        for (int i = 0; i < MORE_PARTS; ++i) {
            const uint32_t tiles = (part.n + OUT_ROWS - 1) / OUT_ROWS;
            if (tile < tiles || p.more[i].n == 0) break;
            tile -= tiles;
            part = p.more[i];
        }
    }
    return part;
}

template <class T, int MT, int RT, int S, int WARPS, bool GATED>
__device__ __forceinline__ void linear_small(const LinearParams& p) {
    constexpr int OUT_ROWS = GATED ? RT * 8 : RT * 16; // outputs of a tile
    constexpr int SUMS = RT * MT * 128;                // partial sums of a warp
    __shared__ __align__(16) float partial[2][WARPS][SUMS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    uint32_t tiles = (p.n + OUT_ROWS - 1) / OUT_ROWS;
    if constexpr (!GATED) {
#pragma unroll
        for (int i = 0; i < MORE_PARTS; ++i) tiles += (p.more[i].n + OUT_ROWS - 1) / OUT_ROWS;
    }
    const uint32_t strips = p.c / 32, chunks = (strips + S - 1) / S;
    const size_t row_bytes = static_cast<size_t>(p.c) * 2;

    uint4 w[S][RT][2], x[S][MT];
    uint32_t load_tile = blockIdx.x, load_chunk = warp;
    const char *w_low[RT], *w_high[RT], *x_at = static_cast<const char*>(p.x) + g * (p.x_stride * 2) + c * 16;
    auto locate = [&] {
        uint32_t tile = load_tile;
        const LinearPart part = part_of<OUT_ROWS, GATED>(p, tile);
#pragma unroll
        for (int r = 0; r < RT; ++r) {
            const uint32_t row0 = tile * OUT_ROWS + r * (GATED ? 8 : 16);
            const uint32_t low = min(row0 + g, part.n - 1), high = GATED ? low : min(row0 + 8 + g, part.n - 1);
            w_low[r] = static_cast<const char*>(part.w) + low * row_bytes + c * 16;
            w_high[r] = static_cast<const char*>(GATED ? p.w_up : part.w) + high * row_bytes + c * 16;
        }
    };
    auto load_w = [&](int j) {
        const uint32_t strip = load_chunk * S + j;
        const bool wanted = load_tile < tiles && strip < strips;
#pragma unroll
        for (int r = 0; r < RT; ++r) {
            w[j][r][0] = stream16_if(w_low[r] + strip * 64, wanted);
            w[j][r][1] = stream16_if(w_high[r] + strip * 64, wanted);
        }
    };
    auto load_x = [&](int j) {
        const uint32_t strip = load_chunk * S + j;
        const bool wanted = load_tile < tiles && strip < strips;
#pragma unroll
        for (int t = 0; t < MT; ++t)
            x[j][t] = cached16_if(x_at + t * (p.x_stride * 16) + strip * 64, wanted && t * 8 + g < p.m);
    };
    auto step = [&] {
        load_chunk += WARPS;
        if (load_chunk >= chunks) {
            load_chunk = warp, load_tile += gridDim.x;
            locate();
        }
    };
    // A warp with no chunk of its own (few chunks, many warps) still takes part in the sums.
    const bool has_chunks = static_cast<uint32_t>(warp) < chunks;
    // A warp with one chunk has the same elements of x in every tile, and keeps them.
    const bool keeps_x = chunks <= WARPS;
    locate();
    if (has_chunks) {
#pragma unroll
        for (int j = 0; j < S; ++j) load_w(j);
    }
    wait_for_previous_kernel();
    release_next_kernel();
    if (has_chunks) {
#pragma unroll
        for (int j = 0; j < S; ++j) load_x(j);
        step();
    }

    int buffer = 0;
    for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x, buffer ^= 1) {
        float acc[RT][MT][4] = {};
        for (uint32_t chunk = warp; chunk < chunks; chunk += WARPS) {
#pragma unroll
            for (int j = 0; j < S; ++j) {
#pragma unroll
                for (int r = 0; r < RT; ++r) {
                    const uint4 low = w[j][r][0], high = w[j][r][1];
                    const uint32_t a0[4] = {low.x, high.x, low.y, high.y}, a1[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
                    for (int t = 0; t < MT; ++t) {
                        T::mma(acc[r][t], a0, x[j][t].x, x[j][t].y);
                        T::mma(acc[r][t], a1, x[j][t].z, x[j][t].w);
                    }
                }
                load_w(j);
                if (!keeps_x) load_x(j);
            }
            step();
        }
#pragma unroll
        for (int r = 0; r < RT; ++r)
#pragma unroll
            for (int t = 0; t < MT; ++t)
                *reinterpret_cast<float4*>(&partial[buffer][warp][(r * MT + t) * 128 + lane * 4]) =
                    make_float4(acc[r][t][0], acc[r][t][1], acc[r][t][2], acc[r][t][3]);
        __syncthreads();
        uint32_t tile_in_part = tile;
        const LinearPart part = part_of<OUT_ROWS, GATED>(p, tile_in_part);
        // Sum i of a warp belongs to fragment i / 128, lane i / 4 % 32, register i % 4.
        constexpr int OUTPUTS = GATED ? SUMS / 2 : SUMS;
        for (int o = threadIdx.x; o < OUTPUTS; o += WARPS * 32) {
            const int i = GATED ? o / 2 * 4 + o % 2 : o; // gated: registers 0, 1; their up sums are two further
            const int fragment = i / 128, at = i / 4 % 32, reg = i % 4;
            const uint32_t token = fragment % MT * 8 + at % 4 * 2 + reg % 2;
            const uint32_t row = tile_in_part * OUT_ROWS + fragment / MT * (GATED ? 8 : 16) + at / 4 + reg / 2 * 8;
            if (token >= p.m || row >= part.n) continue;
            const size_t y_at = static_cast<size_t>(token) * part.y_stride + row;
            float sum = p.residual != nullptr ? load_activation(p.residual, y_at, p.y_type) : 0.0f;
            float own = part.bias != nullptr ? part.bias[row] : 0.0f, up = 0.0f;
#pragma unroll
            for (int k = 0; k < WARPS; ++k) own += partial[buffer][k][i];
            if constexpr (GATED) {
#pragma unroll
                for (int k = 0; k < WARPS; ++k) up += partial[buffer][k][i + 2];
                own = gate_activation(own, p.activation) * up;
            }
            store_activation(part.y, y_at, p.y_type, sum + own);
        }
    }
}

} // namespace pagemill

#define LINEAR_KERNEL(name, T, MT, RT, S, WARPS, BLOCKS, GATED)                                                     \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)                                                \
        linear_small_##name(const __grid_constant__ pagemill::LinearParams p) {                                     \
        pagemill::linear_small<pagemill::T, MT, RT, S, WARPS, GATED>(p);                                            \
    }

#ifdef LINEAR_TUNE
#define V(MT, RT, S, W, B) LINEAR_KERNEL(bf16_t##MT##_r##RT##_s##S##_w##W##_b##B, Bf16, MT, RT, S, W, B, false) \
    LINEAR_KERNEL(gated_bf16_t##MT##_r##RT##_s##S##_w##W##_b##B, Bf16, MT, RT, S, W, B, true)
#include "bench/linear_variants.inc"
#else
// Up to 8 tokens: one thread block of 16 warps a multiprocessor; up to 16: two of 8 (measured best, NOTES.md). Gated
// layers of more than 8 are the library's.
#define LINEAR_KERNELS(name, T)                                                                                     \
    LINEAR_KERNEL(name##_m8, T, 1, 1, 8, 16, 1, false)                                                              \
    LINEAR_KERNEL(name##_m16, T, 2, 1, 4, 8, 2, false)                                                              \
    LINEAR_KERNEL(gated_##name##_m8, T, 1, 1, 8, 16, 1, true)
LINEAR_KERNELS(bf16, Bf16)
LINEAR_KERNELS(f16, F16)
#endif
