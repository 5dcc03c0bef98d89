// What the products with repacked weights share: their argument, its parts, and the way of a tile to shared memory.
// Decides no arithmetic.
#pragma once
#include "quant_formats.cuh"

namespace pagemill {

constexpr int MORE_QUANT_PARTS = 2;

/// A further product of the same x, with weights of the same format.
struct QuantPart {
    const void* w;     // repacked tiles of [N, C]
    const float* bias; // [N] or null
    void* y;           // [M, y_stride]
    uint32_t n;        // 0: there is none, and none after it
    uint32_t y_stride;
};

struct QuantParams {
    const void* x;        // [M, x_stride] bf16
    const void* w;        // repacked tiles of [N, C]; gated: the gate's
    const void* w_up;     // gated: up's, likewise; else null
    const float* bias;    // [N] or null (not gated)
    const void* residual; // [M, y_stride] elements of y_type, added, or null (with more parts: null); may be y
    void* y;              // [M, y_stride] elements of y_type
    uint32_t m;
    uint32_t n;
    uint32_t c;           // multiple of 32
    uint32_t x_stride;
    uint32_t y_stride;
    uint32_t y_type;      // ActivationType
    uint32_t activation;  // GateActivation
    QuantPart more[MORE_QUANT_PARTS]; // not in the gated form
};
static_assert(sizeof(QuantPart) == 32 && sizeof(QuantParams) == 144, "src/kernels/linear_quant.rs has the same");

constexpr uint32_t ONES = 0x3f803f80;

/// The part that `tile` (of OUT_ROWS outputs) belongs to, and in `tile` its number there. Behind the last tile: the
/// last part, and a number behind its tiles.
template <int OUT_ROWS, bool GATED> __device__ __forceinline__ QuantPart part_of(const QuantParams& p, uint32_t& tile) {
    QuantPart part = {p.w, p.bias, p.y, p.n, p.y_stride};
    if constexpr (!GATED) {
#pragma unroll
        for (int i = 0; i < MORE_QUANT_PARTS; ++i) {
            const uint32_t tiles = (part.n + OUT_ROWS - 1) / OUT_ROWS;
            if (tile < tiles || p.more[i].n == 0) break;
            tile -= tiles;
            part = p.more[i];
        }
    }
    return part;
}

/// A row tile's k tiles, on their way to shared memory: where the first halves' bytes come from, and the second ones',
/// which without a gate follow them. Gated: row tile 2i is the first half of tiles i, 2i + 1 the second.
template <class F> struct RowTile {
    static constexpr int TILE_BYTES = 2 * F::HALF_BYTES;
    const char* low;
    const char* high; // counted from where a first half would be
    template <bool GATED> __device__ __forceinline__ void locate(const QuantPart& part, const void* w_up, uint32_t row_tile, uint32_t k_tiles) {
        const size_t at = static_cast<size_t>(GATED ? row_tile / 2 : row_tile) * k_tiles * TILE_BYTES;
        low = static_cast<const char*>(part.w) + at;
        high = low;
        if constexpr (GATED) {
            const uint32_t half = row_tile % 2 * F::HALF_BYTES;
            high = static_cast<const char*>(w_up) + at + half - F::HALF_BYTES;
            low += half;
        }
    }
    __device__ __forceinline__ void skip(uint32_t bytes) { low += bytes, high += bytes; }
    /// K tiles by one warp, in the background; a lane's first bytes are those at `low` and `to`.
    template <bool GATED, int TILES> __device__ __forceinline__ void request_from_here(uint32_t to, int lane) const {
        static_assert(F::HALF_BYTES % 16 == 0, "copies are 16 bytes");
#pragma unroll
        for (int i = 0; i < TILES * TILE_BYTES; i += 512) {
            const int byte = i + lane * 16;
            const char* from = GATED && byte % TILE_BYTES >= F::HALF_BYTES ? high : low;
            if (i + 512 <= TILES * TILE_BYTES || byte < TILES * TILE_BYTES) copy16_async(to + i, from + i, true);
        }
    }
    /// K tile `k`.
    template <bool GATED> __device__ __forceinline__ void request(uint32_t to, uint32_t k, int lane) const {
        RowTile here = *this;
        here.skip(k * TILE_BYTES + lane * 16);
        here.template request_from_here<GATED, 1>(to + lane * 16, lane);
    }
};

/// A tile from shared memory.
template <class F> __device__ __forceinline__ void load_tile(typename F::Raw& raw, const char* tile, int lane) {
    F::load(raw, 0, tile, lane);
    F::load(raw, 1, tile + F::HALF_BYTES, lane);
}

// Cached loads of x, which every thread block reads. Not `.nc`: under programmatic dependent launch x is written while
// the kernel that reads it is already there.
__device__ __forceinline__ uint4 cached16(const void* p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 cached8(const void* p) {
    uint2 v;
    asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

/// A lane's x of one strip and token as operand B: elements 8c .. 8c + 7, or 4c .. 4c + 3 of each half.
template <class F> __device__ __forceinline__ uint4 load_x(const char* strip, int c) {
    if constexpr (F::GROUPS == 1) return cached16(strip + c * 16);
    const uint2 a = cached8(strip + c * 8), b = cached8(strip + 32 + c * 8);
    return make_uint4(a.x, a.y, b.x, b.y);
}

} // namespace pagemill
