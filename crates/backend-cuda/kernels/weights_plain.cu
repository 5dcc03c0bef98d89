// Weights of every stored type, element by element: embedding rows, widening to a dense matrix, and products of
// a few rows with weights read as they are stored. Simple and exact; faster products are elsewhere.
#include "stored_blocks.cuh"

using namespace stored;

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
#pragma unroll 4
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
