// Element types, their conversions and vector accesses, and sums over a block. Decides how values round;
// knows no op.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

typedef __nv_bfloat16 bf16;
typedef __half f16;

__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ float to_f32(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_f32(f16 x) { return __half2float(x); }

template <class T> __device__ __forceinline__ T from_f32(float x);
template <> __device__ __forceinline__ float from_f32<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_f32<bf16>(float x) { return __float2bfloat16_rn(x); }
// Saturates at the largest finite value, as the CPU does: an infinity in the cache would turn later rows
// into NaN. NaN stays NaN.
template <> __device__ __forceinline__ f16 from_f32<f16>(float x) {
    const float limit = 65504.0f;
    return __float2half_rn(x > limit ? limit : (x < -limit ? -limit : x));
}

// `N` neighbouring elements, moved by one access of up to 16 bytes.
template <class T, int N> struct alignas(sizeof(T) * N) Pack {
    T at[N];
};

// The store names its width: the compiler merges those of two branches element by element, two bytes each.
template <class T, int N> __device__ __forceinline__ void store_pack(T* to, const Pack<T, N>& pack) {
    constexpr int BYTES = sizeof(pack);
    if constexpr (BYTES % 8 != 0) {
        *reinterpret_cast<Pack<T, N>*>(to) = pack;
    } else {
        uint32_t w[BYTES / 4];
        memcpy(w, &pack, BYTES);
        if constexpr (BYTES == 8) asm volatile("st.global.v2.b32 [%0], {%1,%2};" ::"l"(to), "r"(w[0]), "r"(w[1]) : "memory");
#pragma unroll
        for (int i = 0; i < BYTES / 16; ++i)
            asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(reinterpret_cast<char*>(to) + i * 16), "r"(w[i * 4]), "r"(w[i * 4 + 1]), "r"(w[i * 4 + 2]), "r"(w[i * 4 + 3]) : "memory");
    }
}

template <int N, class T> __device__ __forceinline__ void load_f32(const T* from, float (&to)[N]) {
    Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(from);
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = to_f32(pack.at[i]);
}

template <int N, class T> __device__ __forceinline__ void store_f32(T* to, const float (&from)[N]) {
    Pack<T, N> pack;
#pragma unroll
    for (int i = 0; i < N; ++i) pack.at[i] = from_f32<T>(from[i]);
    store_pack(to, pack);
}

// Has L2 fetch the line of 128 bytes that `p` lies in, where all multiprocessors write too: safe
// beside a kernel that still writes there.
__device__ __forceinline__ void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// The sum over all threads of the block, in every thread; always in the same order. At most 1,024 threads.
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float of_warp[32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_warps = (blockDim.x + 31) / 32;
    x = warp_sum(x);
    if (num_warps == 1) return x;
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    return warp_sum(lane < num_warps ? of_warp[lane] : 0.0f);
}
