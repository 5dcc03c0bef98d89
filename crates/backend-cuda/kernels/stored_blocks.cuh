// Blocks of every stored type, as GGUF lays them out: bytes and elements of a block, and element `i` of one. Of the
// types that are repacked (quant_formats.cuh) also its quant, unsigned. Knows no op.
#pragma once
#include "element.cuh"

namespace stored {

struct F32 {
    static constexpr int elems = 1, bytes = 4;
    __device__ static float at(const uint8_t* p, int) { return *reinterpret_cast<const float*>(p); }
};
struct F16 {
    static constexpr int elems = 1, bytes = 2;
    __device__ static float at(const uint8_t* p, int) { return to_f32(*reinterpret_cast<const f16*>(p)); }
};
struct BF16 {
    static constexpr int elems = 1, bytes = 2;
    __device__ static float at(const uint8_t* p, int) { return to_f32(*reinterpret_cast<const bf16*>(p)); }
};

// All blocks have an even size, so their halves are aligned.
__device__ __forceinline__ float half_at(const uint8_t* p) { return to_f32(*reinterpret_cast<const f16*>(p)); }
__device__ __forceinline__ int nibble(const uint8_t* p, int i) { return i < 16 ? p[i] & 15 : p[i - 16] >> 4; }
__device__ __forceinline__ int fifth_bit(const uint8_t* p, int i) { return (p[i / 8] >> (i % 8) & 1) << 4; }

struct Q4_0 {
    static constexpr int elems = 32, bytes = 18;
    __device__ static int quant(const uint8_t* p, int i) { return nibble(p + 2, i); }
    __device__ static float at(const uint8_t* p, int i) { return half_at(p) * float(quant(p, i) - 8); }
};
struct Q4_1 {
    static constexpr int elems = 32, bytes = 20;
    __device__ static int quant(const uint8_t* p, int i) { return nibble(p + 4, i); }
    __device__ static float at(const uint8_t* p, int i) { return half_at(p) * float(quant(p, i)) + half_at(p + 2); }
};
struct Q5_0 {
    static constexpr int elems = 32, bytes = 22;
    __device__ static float at(const uint8_t* p, int i) {
        return half_at(p) * float((nibble(p + 6, i) | fifth_bit(p + 2, i)) - 16);
    }
};
struct Q5_1 {
    static constexpr int elems = 32, bytes = 24;
    __device__ static float at(const uint8_t* p, int i) {
        return half_at(p) * float(nibble(p + 8, i) | fifth_bit(p + 4, i)) + half_at(p + 2);
    }
};
struct Q8_0 {
    static constexpr int elems = 32, bytes = 34;
    __device__ static int quant(const uint8_t* p, int i) { return int8_t(p[2 + i]) + 128; }
    __device__ static float at(const uint8_t* p, int i) { return half_at(p) * float(int8_t(p[2 + i])); }
};

// Two bits of element `i` of 256: four planes of 32 bytes' worth in each half.
__device__ __forceinline__ int two_bits(const uint8_t* p, int i) { return p[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3; }

struct Q2_K { // scales[16], qs[64], d, dmin
    static constexpr int elems = 256, bytes = 84;
    __device__ static float at(const uint8_t* p, int i) {
        const int scale = p[i / 16];
        return half_at(p + 80) * float(scale & 15) * float(two_bits(p + 16, i)) - half_at(p + 82) * float(scale >> 4);
    }
};
struct Q3_K { // hmask[32], qs[64], scales[12], d
    static constexpr int elems = 256, bytes = 110;
    __device__ static float at(const uint8_t* p, int i) {
        const uint8_t* s = p + 96;
        const int sub = i / 16;
        const int low = sub < 8 ? s[sub] & 15 : s[sub - 8] >> 4;
        const int scale = (low | (s[8 + sub % 4] >> (sub / 4 * 2) & 3) << 4) - 32;
        const int high = p[i % 32] >> (i / 32) & 1;
        return half_at(p + 108) * float(scale) * float(two_bits(p + 32, i) - (high ? 0 : 4));
    }
};
// Scale and minimum of sub-block `sub` of 8, six bits each in 12 bytes.
__device__ __forceinline__ void six_bits(const uint8_t* s, int sub, int& scale, int& minimum) {
    if (sub < 4) {
        scale = s[sub] & 63;
        minimum = s[sub + 4] & 63;
    } else {
        scale = (s[sub + 4] & 15) | (s[sub - 4] >> 6) << 4;
        minimum = (s[sub + 4] >> 4) | (s[sub] >> 6) << 4;
    }
}
__device__ __forceinline__ int nibble_of_64(const uint8_t* p, int i) {
    const int byte = p[i / 64 * 32 + i % 32];
    return i % 64 < 32 ? byte & 15 : byte >> 4;
}
struct Q4_K { // d, dmin, scales[12], qs[128]
    static constexpr int elems = 256, bytes = 144;
    __device__ static int quant(const uint8_t* p, int i) { return nibble_of_64(p + 16, i); }
    __device__ static float at(const uint8_t* p, int i) {
        int scale, minimum;
        six_bits(p + 4, i / 32, scale, minimum);
        return half_at(p) * float(scale) * float(quant(p, i)) - half_at(p + 2) * float(minimum);
    }
};
struct Q5_K { // d, dmin, scales[12], qh[32], qs[128]
    static constexpr int elems = 256, bytes = 176;
    __device__ static float at(const uint8_t* p, int i) {
        int scale, minimum;
        six_bits(p + 4, i / 32, scale, minimum);
        const int q = nibble_of_64(p + 48, i) | (p[16 + i % 32] >> (i / 32) & 1) << 4;
        return half_at(p) * float(scale) * float(q) - half_at(p + 2) * float(minimum);
    }
};
struct Q6_K { // ql[128], qh[64], scales[16] (signed), d
    static constexpr int elems = 256, bytes = 210;
    __device__ static int quant(const uint8_t* p, int i) {
        const int plane = i % 128 / 32;
        const int low = p[i / 128 * 64 + i % 32 + (plane & 1) * 32];
        return (plane < 2 ? low & 15 : low >> 4) | (p[128 + i / 128 * 32 + i % 32] >> (plane * 2) & 3) << 4;
    }
    __device__ static float at(const uint8_t* p, int i) {
        return half_at(p + 208) * float(int8_t(p[192 + i / 16])) * float(quant(p, i) - 32);
    }
};

} // namespace stored
