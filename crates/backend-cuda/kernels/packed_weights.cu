// Quantised weights into the layout of quant_formats.cuh and out of it: repacking at load, widening to bf16 for
// products of many tokens, and embedding rows. Each keeps every bit of what is stored. One warp a tile; memory bounds
// all of them.
#include "quant_formats.cuh"
#include "stored_blocks.cuh"

namespace pagemill {

struct RepackArgs {
    const uint8_t* stored; // [rows, row_bytes]
    char* tiles;           // [rows / 16, C / 128] tiles
    uint64_t row_bytes;
    uint32_t rows;
    uint32_t cols;
};

struct WidenPackedArgs {
    const char* tiles; // from the first row wanted on, a multiple of 16
    bf16* out;         // [rows, cols]
    uint32_t rows;
    uint32_t cols;
};

struct EmbedPackedArgs {
    const char* tiles;   // [V / 16, C / 128] tiles
    const uint32_t* ids; // [gridDim.x]
    float* out;          // [gridDim.x, cols]
    uint32_t cols;
    float scale;
    uint32_t first_id; // the table's first row's
    uint32_t num_rows; // V; the rows of all other ids are zero
};

template <class V> __device__ __forceinline__ void write(char* to, V value) { *reinterpret_cast<V*>(to) = value; }
__device__ __forceinline__ uint16_t two_bytes(const uint8_t* p) { return *reinterpret_cast<const uint16_t*>(p); }

// Scales of strip `strip` of row g, from its block and the strip's number `sub` there. A block of 0: zeros.
__device__ __forceinline__ void repack_scales(Q4_0, char* half, int g, int strip, const uint8_t* block, int) {
    write<uint16_t>(half + 512 + g * 8 + strip * 2, block != nullptr ? two_bytes(block) : 0);
}
__device__ __forceinline__ void repack_scales(Q8_0, char* half, int g, int strip, const uint8_t* block, int) {
    write<uint16_t>(half + 1024 + g * 8 + strip * 2, block != nullptr ? two_bytes(block) : 0);
}
__device__ __forceinline__ void repack_scales(Q4_1, char* half, int g, int strip, const uint8_t* block, int) {
    write<uint16_t>(half + 512 + g * 16 + strip * 4, block != nullptr ? two_bytes(block) : 0);
    write<uint16_t>(half + 514 + g * 16 + strip * 4, block != nullptr ? two_bytes(block + 2) : 0);
}
__device__ __forceinline__ void repack_scales(Q4_K, char* half, int g, int strip, const uint8_t* block, int sub) {
    int scale = 0, minimum = 0;
    if (block != nullptr) stored::six_bits(block + 4, sub, scale, minimum);
    if (strip < 2) write<uint16_t>(half + 512 + g * 4 + strip * 2, block != nullptr ? two_bytes(block + strip * 2) : 0);
    write<uint8_t>(half + 544 + g * 4 + strip, scale);
    write<uint8_t>(half + 576 + g * 4 + strip, minimum);
}
__device__ __forceinline__ void repack_scales(Q6_K, char* half, int g, int strip, const uint8_t* block, int sub) {
    write<uint16_t>(half + 768 + g * 8 + strip * 2, block != nullptr ? two_bytes(block + 192 + sub * 2) : 0);
    if (strip == 0) write<uint16_t>(half + 832 + g * 2, block != nullptr ? two_bytes(block + 208) : 0);
}

/// The tile of this warp, if there is one.
__device__ __forceinline__ bool own_tile(uint32_t rows, uint32_t cols, uint32_t& row0, uint32_t& col0, size_t& tile) {
    const uint32_t k_tiles = (cols + TILE_COLS - 1) / TILE_COLS, row_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    tile = static_cast<size_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    row0 = static_cast<uint32_t>(tile / k_tiles) * TILE_ROWS, col0 = static_cast<uint32_t>(tile % k_tiles) * TILE_COLS;
    return tile < static_cast<size_t>(row_tiles) * k_tiles;
}

template <class F, class W> __device__ __forceinline__ void repack(const RepackArgs& args) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    uint32_t row0, col0;
    size_t tile;
    if (!own_tile(args.rows, args.cols, row0, col0, tile)) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        char* half = args.tiles + (tile * 2 + h) * F::HALF_BYTES;
        const uint32_t row = row0 + h * HALF_ROWS + g;
        // The block that holds a column, and the column's place in it; null behind the matrix.
        auto locate = [&](uint32_t col, int& i) -> const uint8_t* {
            i = col % W::elems;
            if (row >= args.rows || col >= args.cols) return nullptr;
            return args.stored + row * args.row_bytes + static_cast<size_t>(col / W::elems) * W::bytes;
        };
        uint32_t low[STRIPS] = {}, high[STRIPS] = {}, top[2] = {};
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
            int first;
            const uint8_t* block = locate(col0 + strip * STRIP, first);
            if (block == nullptr) continue;
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const uint32_t q = W::quant(block, first + place_in_strip<F>(c, e));
                low[strip] |= (q & 15) << (e / 2 * 4 + e % 2 * 16);
                if constexpr (F::TWO_PLANES) high[strip] |= (q >> 4) << (e / 2 * 4 + e % 2 * 16);
                if constexpr (F::GROUPS == 2) top[strip / 2] |= (q >> 4) << (strip % 2 * 8 + e / 2 * 2 + e % 2 * 16);
            }
        }
        write(half + lane * 16, make_uint4(low[0], low[1], low[2], low[3]));
        if constexpr (F::TWO_PLANES) write(half + 512 + lane * 16, make_uint4(high[0], high[1], high[2], high[3]));
        if constexpr (F::GROUPS == 2) write(half + 512 + lane * 8, make_uint2(top[0], top[1]));
        int first;
        const uint8_t* block = locate(col0 + c * STRIP, first);
        repack_scales(F(), half, g, c, block, first / STRIP);
    }
}

template <class F> __device__ __forceinline__ void widen_packed(const WidenPackedArgs& args) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    uint32_t row0, col0;
    size_t tile;
    if (!own_tile(args.rows, args.cols, row0, col0, tile)) return;
    const Spread spread;
    typename F::Raw r;
#pragma unroll
    for (int h = 0; h < 2; ++h) F::load(r, h, args.tiles + (tile * 2 + h) * F::HALF_BYTES, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const uint32_t row = row0 + h * HALF_ROWS + g;
        if (row >= args.rows) continue;
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
            if (col0 + strip * STRIP >= args.cols) break;
            float v[8];
            values<F>(v, r, strip, h, spread);
            bf16* to = args.out + static_cast<size_t>(row) * args.cols + col0 + strip * STRIP;
            const uint2 front = make_uint2(Bf16::pack(v[0], v[1]), Bf16::pack(v[2], v[3]));
            const uint2 back = make_uint2(Bf16::pack(v[4], v[5]), Bf16::pack(v[6], v[7]));
            if constexpr (F::GROUPS == 1) {
                *reinterpret_cast<uint4*>(to + c * 8) = make_uint4(front.x, front.y, back.x, back.y);
            } else {
                *reinterpret_cast<uint2*>(to + c * 4) = front;
                *reinterpret_cast<uint2*>(to + 16 + c * 4) = back;
            }
        }
    }
}

/// One thread block a row; a thread takes lane c's eight elements of each strip of a tile.
template <class F> __device__ __forceinline__ void embed_packed(const EmbedPackedArgs& args) {
    const uint32_t row = args.ids[blockIdx.x] - args.first_id; // wraps below the first
    if (row >= args.num_rows) {
        float* out = args.out + static_cast<size_t>(blockIdx.x) * args.cols;
        for (uint32_t c = threadIdx.x; c < args.cols; c += blockDim.x) out[c] = 0.0f;
        return;
    }
    const uint32_t k_tiles = (args.cols + TILE_COLS - 1) / TILE_COLS;
    const int g = row % HALF_ROWS, h = row % TILE_ROWS / HALF_ROWS;
    const Spread spread;
    for (uint32_t i = threadIdx.x; i < k_tiles * 4; i += blockDim.x) {
        const uint32_t k_tile = i / 4;
        const int c = i % 4;
        const size_t tile = static_cast<size_t>(row / TILE_ROWS) * k_tiles + k_tile;
        typename F::Raw r;
        F::load(r, 0, args.tiles + (tile * 2 + h) * F::HALF_BYTES, g * 4 + c);
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
            const uint32_t col = k_tile * TILE_COLS + strip * STRIP;
            if (col >= args.cols) break;
            float v[8];
            values<F>(v, r, strip, 0, spread);
            float* to = args.out + static_cast<size_t>(blockIdx.x) * args.cols + col;
#pragma unroll
            for (int e = 0; e < 8; ++e) to[place_in_strip<F>(c, e)] = v[e] * args.scale;
        }
    }
}

} // namespace pagemill

#define PACKED_KERNELS(name, F)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256) repack_##name(pagemill::RepackArgs args) {                    \
        pagemill::repack<pagemill::F, stored::F>(args);                                                             \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256) widen_packed_##name(pagemill::WidenPackedArgs args) {         \
        pagemill::widen_packed<pagemill::F>(args);                                                                  \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256) embed_packed_##name(pagemill::EmbedPackedArgs args) {         \
        pagemill::embed_packed<pagemill::F>(args);                                                                  \
    }
PACKED_KERNELS(q4_0, Q4_0)
PACKED_KERNELS(q4_1, Q4_1)
PACKED_KERNELS(q8_0, Q8_0)
PACKED_KERNELS(q4_k, Q4_K)
PACKED_KERNELS(q6_k, Q6_K)
