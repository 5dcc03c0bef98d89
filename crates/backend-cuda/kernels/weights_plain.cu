// Weights of every stored type, element by element: embedding rows, widening to a dense matrix, and products of
// a few rows with weights read as they are stored. Simple and exact; faster products are elsewhere.
#include "element.cuh"

// Bytes and elements of a block, and element `i` of one, as GGUF stores them.
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
    __device__ static float at(const uint8_t* p, int i) { return half_at(p) * float(nibble(p + 2, i) - 8); }
};
struct Q4_1 {
    static constexpr int elems = 32, bytes = 20;
    __device__ static float at(const uint8_t* p, int i) { return half_at(p) * float(nibble(p + 4, i)) + half_at(p + 2); }
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
    __device__ static float at(const uint8_t* p, int i) {
        int scale, minimum;
        six_bits(p + 4, i / 32, scale, minimum);
        return half_at(p) * float(scale) * float(nibble_of_64(p + 16, i)) - half_at(p + 2) * float(minimum);
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
    __device__ static float at(const uint8_t* p, int i) {
        const int plane = i % 128 / 32;
        const int low = p[i / 128 * 64 + i % 32 + (plane & 1) * 32];
        const int q = (plane < 2 ? low & 15 : low >> 4) | (p[128 + i / 128 * 32 + i % 32] >> (plane * 2) & 3) << 4;
        return half_at(p + 208) * float(int8_t(p[192 + i / 16])) * float(q - 32);
    }
};

template <class W> __device__ __forceinline__ float element(const uint8_t* row, uint32_t c) {
    return W::at(row + size_t(c / W::elems) * W::bytes, c % W::elems);
}

struct EmbedArgs {
    const uint8_t* table; // [V, row_bytes]
    const uint32_t* ids;  // [gridDim.x]
    void* out;            // [gridDim.x, cols]
    uint64_t row_bytes;
    uint32_t cols;
    float scale;
    uint32_t first_id; // the table's first row's
    uint32_t num_rows; // V; the rows of all other ids are zero
};

template <class W, class To> __device__ __forceinline__ void embed(const EmbedArgs& args) {
    const uint32_t id = args.ids[blockIdx.x] - args.first_id; // wraps below the first
    To* out = static_cast<To*>(args.out) + size_t(blockIdx.x) * args.cols;
    if (id >= args.num_rows) {
        for (uint32_t c = threadIdx.x; c < args.cols; c += blockDim.x) out[c] = from_f32<To>(0.0f);
        return;
    }
    const uint8_t* row = args.table + id * args.row_bytes;
    for (uint32_t c = threadIdx.x; c < args.cols; c += blockDim.x) {
        out[c] = from_f32<To>(element<W>(row, c) * args.scale);
    }
}

struct WidenArgs {
    const uint8_t* weight; // [rows, row_bytes], from the first row wanted on
    void* out;             // [rows, cols]
    uint64_t row_bytes;
    uint32_t cols;
};

// One block in x for each row, more in y for its columns.
template <class W, class To> __device__ __forceinline__ void widen(const WidenArgs& args) {
    const uint8_t* row = args.weight + blockIdx.x * args.row_bytes;
    To* out = static_cast<To*>(args.out) + size_t(blockIdx.x) * args.cols;
    for (uint32_t c = blockIdx.y * blockDim.x + threadIdx.x; c < args.cols; c += gridDim.y * blockDim.x) {
        out[c] = from_f32<To>(element<W>(row, c));
    }
}

struct FewRowsArgs {
    const void* x;         // [T, cols], T <= 8
    const uint8_t* weight; // [N, row_bytes]
    void* out;             // [T, N]
    uint64_t row_bytes;
    uint32_t num_rows; // N
    uint32_t cols;
    uint32_t num_tokens;
};

#define FEW_ROWS 8

// One warp for each output feature; every weight is decoded once for all tokens.
template <class W, class Tx, class To> __device__ __forceinline__ void multiply(const FewRowsArgs& args) {
    const uint32_t n = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (n >= args.num_rows) return;
    const uint8_t* row = args.weight + n * args.row_bytes;
    const Tx* x = static_cast<const Tx*>(args.x);
    float sum[FEW_ROWS] = {};
    for (uint32_t c = lane; c < args.cols; c += 32) {
        const float w = element<W>(row, c);
#pragma unroll
        for (int t = 0; t < FEW_ROWS; ++t) {
            if (t < args.num_tokens) sum[t] += w * to_f32(x[size_t(t) * args.cols + c]);
        }
    }
#pragma unroll
    for (int t = 0; t < FEW_ROWS; ++t) {
        const float total = warp_sum(sum[t]);
        if (lane == 0 && t < args.num_tokens) {
            static_cast<To*>(args.out)[size_t(t) * args.num_rows + n] = from_f32<To>(total);
        }
    }
}

#define KERNELS_OF(W)                                                                                               \
    extern "C" __global__ void embed_##W##_f32(EmbedArgs args) { embed<W, float>(args); }                           \
    extern "C" __global__ void widen_##W##_f32(WidenArgs args) { widen<W, float>(args); }                           \
    extern "C" __global__ void widen_##W##_bf16(WidenArgs args) { widen<W, bf16>(args); }                           \
    extern "C" __global__ void few_rows_##W##_f32_f32(FewRowsArgs args) { multiply<W, float, float>(args); }        \
    extern "C" __global__ void few_rows_##W##_f32_bf16(FewRowsArgs args) { multiply<W, float, bf16>(args); }        \
    extern "C" __global__ void few_rows_##W##_bf16_f32(FewRowsArgs args) { multiply<W, bf16, float>(args); }        \
    extern "C" __global__ void few_rows_##W##_bf16_bf16(FewRowsArgs args) { multiply<W, bf16, bf16>(args); }

KERNELS_OF(F32)
KERNELS_OF(F16)
KERNELS_OF(BF16)
KERNELS_OF(Q4_0)
KERNELS_OF(Q4_1)
KERNELS_OF(Q5_0)
KERNELS_OF(Q5_1)
KERNELS_OF(Q8_0)
KERNELS_OF(Q2_K)
KERNELS_OF(Q3_K)
KERNELS_OF(Q4_K)
KERNELS_OF(Q5_K)
KERNELS_OF(Q6_K)
