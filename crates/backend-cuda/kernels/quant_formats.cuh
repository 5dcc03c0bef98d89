// Repacked quantised weights: how the formats lie in memory and how a lane turns them into tensor-core operands or
// numbers. `packed_weights.cu` writes this layout at load, `linear_quant.cu` multiplies with it;
// `src/kernels/linear_quant.rs` has the table of a tile's bytes. Knows no op.
//
// A tile is 16 rows by 128 elements of C (four strips of 32), in two halves of 8 rows, each in one piece: a gated
// product puts a half of the gate's tile and one of up's together. Tiles lie [N / 16][C / 128]. Inside a half, lane
// (g, c) of a warp finds its 8 elements of each strip of row g in one word (fragments.cuh). Elements behind C and rows
// behind N are zeros with scale 0.
#pragma once
#include "fragments.cuh"

namespace pagemill {

constexpr int TILE_ROWS = 16, HALF_ROWS = 8, TILE_COLS = 128, STRIP = 32, STRIPS = TILE_COLS / STRIP;
constexpr uint32_t NIBBLES = 0x000f000f, BIASED = 0x43004300, FLOAT_OF_BYTE = 0x4b000000;

/// A constant that the compiler keeps in a register: masks and offset then meet in one instruction, which has room
/// for one literal only, and an operand of four equal words is not built anew for every product.
__device__ __forceinline__ uint32_t in_register(uint32_t value) {
    uint32_t out;
    asm volatile("mov.u32 %0, %1;" : "=r"(out) : "r"(value));
    return out;
}
struct Spread { uint32_t mask = in_register(NIBBLES), bias = in_register(BIASED), float_of_byte = in_register(FLOAT_OF_BYTE); };

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ __forceinline__ float half_of(uint32_t pair, int i) { return i == 0 ? F16::low(pair) : F16::high(pair); }
/// (x & mask) | bias.
__device__ __forceinline__ uint32_t masked_or(uint32_t x, uint32_t mask, uint32_t bias) {
    uint32_t out;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(x), "r"(mask), "r"(bias));
    return out;
}
/// Four pairs of 128 + nibble: as bf16 numbers, whose lowest bit weighs 1 there.
__device__ __forceinline__ void spread_nibbles(uint32_t (&pair)[4], uint32_t word, const Spread& c) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pair[i] = masked_or(word >> (4 * i), c.mask, c.bias);
}

template <class V> __device__ __forceinline__ V read(const char* from) { return *reinterpret_cast<const V*>(from); }

// A format: `Raw` is what a lane holds of a tile; `load` fills its half `h` from a half's bytes; `pairs` gives the
// four operand words of a strip's row half, `scale` d and m of w = d (q - BIAS) + m for the operands q. CENTRE, where
// it is not 0, is the bf16 pair of -BIAS (counted once, on the last plane): m is 0 there. `two_scales` gives d and m of
// strips 2 `two` and 2 `two` + 1 of row g straight from a half's bytes, d by strip and group.

/// d times byte `i` of a word, exactly; `minus` is -2^23 d. By the same trick as the nibbles, with 2^23.
__device__ __forceinline__ float times_byte(float d, float minus, uint32_t word, int i, const Spread& c) {
    return fmaf(__uint_as_float(__byte_perm(word, c.float_of_byte, 0x7440 + i)), d, minus);
}

/// Byte `i` of a word, less 128. (2^23 + 128 times d would round: no one multiplication and addition here.)
__device__ __forceinline__ float signed_byte(uint32_t word, int i, const Spread& c) {
    return __uint_as_float(__byte_perm(word, c.float_of_byte, 0x7440 + i)) - (8388608.0f + 128.0f);
}

struct Q4_0 {
    static constexpr int HALF_BYTES = 512 + 64, GROUPS = 1;
    static constexpr bool TWO_PLANES = false;
    static constexpr float BIAS = 136; // 128 and the sign's 8
    static constexpr uint32_t CENTRE = 0xc308c308;
    struct Raw { uint4 q[2]; uint2 s[2]; };
    static __device__ __forceinline__ void load(Raw& r, int h, const char* half, int lane) {
        r.q[h] = read<uint4>(half + lane * 16);
        r.s[h] = read<uint2>(half + 512 + lane / 4 * 8);
    }
    static __device__ __forceinline__ void pairs(uint32_t (&p)[4], const Raw& r, int strip, int h, int, const Spread& c) {
        spread_nibbles(p, word_of(r.q[h], strip), c);
    }
    static __device__ __forceinline__ void scale(const Raw& r, int strip, int, int h, float& d, float& m, const Spread&) {
        d = half_of(strip < 2 ? r.s[h].x : r.s[h].y, strip % 2), m = 0.0f;
    }
    static __device__ __forceinline__ void two_scales(float (&d)[2][1], float (&m)[2], const char* half, int g, int two, const Spread&) {
        const uint32_t both = read<uint32_t>(half + 512 + g * 8 + two * 4);
        d[0][0] = F16::low(both), d[1][0] = F16::high(both), m[0] = m[1] = 0.0f;
    }
};

struct Q8_0 {
    static constexpr int HALF_BYTES = 1024 + 64, GROUPS = 1;
    static constexpr bool TWO_PLANES = true;
    static constexpr float BIAS = 2304; // 128 of the low plane, 16 * 128 of the high one, 128 of the sign
    static constexpr uint32_t CENTRE = 0xc310c310; // -144: the high plane counts 16 times
    struct Raw { uint4 q[2][2]; uint2 s[2]; };
    static __device__ __forceinline__ void load(Raw& r, int h, const char* half, int lane) {
#pragma unroll
        for (int plane = 0; plane < 2; ++plane) r.q[plane][h] = read<uint4>(half + plane * 512 + lane * 16);
        r.s[h] = read<uint2>(half + 1024 + lane / 4 * 8);
    }
    static __device__ __forceinline__ void pairs(uint32_t (&p)[4], const Raw& r, int strip, int h, int plane, const Spread& c) {
        spread_nibbles(p, word_of(r.q[plane][h], strip), c);
    }
    static __device__ __forceinline__ void scale(const Raw& r, int strip, int, int h, float& d, float& m, const Spread&) {
        d = half_of(strip < 2 ? r.s[h].x : r.s[h].y, strip % 2), m = 0.0f;
    }
    static __device__ __forceinline__ void two_scales(float (&d)[2][1], float (&m)[2], const char* half, int g, int two, const Spread&) {
        const uint32_t both = read<uint32_t>(half + 1024 + g * 8 + two * 4);
        d[0][0] = F16::low(both), d[1][0] = F16::high(both), m[0] = m[1] = 0.0f;
    }
};

struct Q4_1 {
    static constexpr int HALF_BYTES = 512 + 128, GROUPS = 1;
    static constexpr bool TWO_PLANES = false;
    static constexpr float BIAS = 128;
    static constexpr uint32_t CENTRE = 0; // minima instead
    struct Raw { uint4 q[2]; uint4 s[2]; };
    static __device__ __forceinline__ void load(Raw& r, int h, const char* half, int lane) {
        r.q[h] = read<uint4>(half + lane * 16);
        r.s[h] = read<uint4>(half + 512 + lane / 4 * 16);
    }
    static __device__ __forceinline__ void pairs(uint32_t (&p)[4], const Raw& r, int strip, int h, int, const Spread& c) {
        spread_nibbles(p, word_of(r.q[h], strip), c);
    }
    static __device__ __forceinline__ void scale(const Raw& r, int strip, int, int h, float& d, float& m, const Spread&) {
        const uint32_t dm = word_of(r.s[h], strip);
        d = F16::low(dm), m = F16::high(dm);
    }
    static __device__ __forceinline__ void two_scales(float (&d)[2][1], float (&m)[2], const char* half, int g, int two, const Spread&) {
        const uint2 both = read<uint2>(half + 512 + g * 16 + two * 8);
        d[0][0] = F16::low(both.x), m[0] = F16::high(both.x), d[1][0] = F16::low(both.y), m[1] = F16::high(both.y);
    }
};

struct Q4_K {
    static constexpr int HALF_BYTES = 512 + 96, GROUPS = 1;
    static constexpr bool TWO_PLANES = false;
    static constexpr float BIAS = 128;
    static constexpr uint32_t CENTRE = 0; // minima instead
    struct Raw { uint4 q[2]; uint32_t dm[2], sc[2], mn[2]; };
    static __device__ __forceinline__ void load(Raw& r, int h, const char* half, int lane) {
        r.q[h] = read<uint4>(half + lane * 16);
        const char* at = half + 512 + lane / 4 * 4;
        r.dm[h] = read<uint32_t>(at), r.sc[h] = read<uint32_t>(at + 32), r.mn[h] = read<uint32_t>(at + 64);
    }
    static __device__ __forceinline__ void pairs(uint32_t (&p)[4], const Raw& r, int strip, int h, int, const Spread& c) {
        spread_nibbles(p, word_of(r.q[h], strip), c);
    }
    static __device__ __forceinline__ void scale(const Raw& r, int strip, int, int h, float& d, float& m, const Spread& c) {
        const float scale = F16::low(r.dm[h]), minimum = -F16::high(r.dm[h]);
        d = times_byte(scale, scale * -8388608.0f, r.sc[h], strip, c);
        m = times_byte(minimum, minimum * -8388608.0f, r.mn[h], strip, c);
    }
    static __device__ __forceinline__ void two_scales(float (&d)[2][1], float (&m)[2], const char* half, int g, int two, const Spread& c) {
        const char* at = half + 512 + g * 4;
        const uint32_t dm = read<uint32_t>(at), sc = read<uint16_t>(at + 32 + two * 2), mn = read<uint16_t>(at + 64 + two * 2);
        const float scale = F16::low(dm), minimum = -F16::high(dm);
        const float scale_minus = scale * -8388608.0f, minimum_minus = minimum * -8388608.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) d[i][0] = times_byte(scale, scale_minus, sc, i, c), m[i] = times_byte(minimum, minimum_minus, mn, i, c);
    }
};

struct Q6_K {
    static constexpr int HALF_BYTES = 512 + 256 + 64 + 16, GROUPS = 2;
    static constexpr bool TWO_PLANES = false;
    static constexpr float BIAS = 160; // 128 and the sign's 32
    static constexpr uint32_t CENTRE = 0xc320c320;
    struct Raw { uint4 q[2]; uint2 top[2]; uint2 sc[2]; uint32_t d[2]; };
    static __device__ __forceinline__ void load(Raw& r, int h, const char* half, int lane) {
        r.q[h] = read<uint4>(half + lane * 16);
        r.top[h] = read<uint2>(half + 512 + lane * 8);
        r.sc[h] = read<uint2>(half + 768 + lane / 4 * 8);
        r.d[h] = read<uint16_t>(half + 832 + lane / 4 * 2);
    }
    static __device__ __forceinline__ void pairs(uint32_t (&p)[4], const Raw& r, int strip, int h, int, const Spread& c) {
        const uint32_t low = word_of(r.q[h], strip), top = strip < 2 ? r.top[h].x : r.top[h].y;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = strip % 2 * 8 + i * 2; // of this pair's two bits in each half
            const uint32_t bits = at >= 4 ? top >> (at - 4) : top << (4 - at);
            p[i] = masked_or(bits, 0x00300030, masked_or(low >> (4 * i), c.mask, c.bias));
        }
    }
    static __device__ __forceinline__ void scale(const Raw& r, int strip, int group, int h, float& d, float& m, const Spread& c) {
        const uint32_t word = strip < 2 ? r.sc[h].x : r.sc[h].y;
        d = F16::low(r.d[h]) * signed_byte(word ^ 0x80808080u, strip % 2 * 2 + group, c), m = 0.0f;
    }
    static __device__ __forceinline__ void two_scales(float (&d)[2][2], float (&m)[2], const char* half, int g, int two, const Spread& c) {
        const uint32_t sc = read<uint32_t>(half + 768 + g * 8 + two * 4) ^ 0x80808080u;
        const float scale = F16::low(read<uint16_t>(half + 832 + g * 2));
#pragma unroll
        for (int i = 0; i < 4; ++i) d[i / 2][i % 2] = scale * signed_byte(sc, i, c);
        m[0] = m[1] = 0.0f;
    }
};

/// Where element `e` of lane c's eight lies in its strip.
template <class F> __device__ __forceinline__ int place_in_strip(int c, int e) {
    return F::GROUPS == 1 ? c * 8 + e : e / 4 * 16 + c * 4 + e % 4;
}

/// A lane's eight elements of a strip's row half, as exactly as the stored form gives them.
template <class F> __device__ __forceinline__ void values(float (&out)[8], const typename F::Raw& r, int strip, int h, const Spread& spread) {
    uint32_t pair[4], top[4];
    F::pairs(pair, r, strip, h, 0, spread);
    if constexpr (F::TWO_PLANES) F::pairs(top, r, strip, h, 1, spread);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        float d, m;
        F::scale(r, strip, F::GROUPS == 2 ? e / 4 : 0, h, d, m, spread);
        float q = e % 2 == 0 ? Bf16::low(pair[e / 2]) : Bf16::high(pair[e / 2]);
        if constexpr (F::TWO_PLANES) q = fmaf(16.0f, e % 2 == 0 ? Bf16::low(top[e / 2]) : Bf16::high(top[e / 2]), q);
        out[e] = F::CENTRE != 0 ? d * (q - F::BIAS) : fmaf(d, q - F::BIAS, m);
    }
}

} // namespace pagemill
