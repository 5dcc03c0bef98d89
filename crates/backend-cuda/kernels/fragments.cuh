// The instructions the fast kernels are made of: tensor-core fragments, streaming loads, programmatic
// dependent launch, and the two half types under one face. Knows no op and no shape.
//
// Fragment shapes are those of mma.m16n8k16: with g = lane / 4 and c = lane % 4, a lane holds
//   A  rows g, g + 8          k 2c, 2c + 1, 2c + 8, 2c + 9     (4 registers of 2 elements)
//   B  column g               k 2c, 2c + 1, 2c + 8, 2c + 9     (2 registers)
//   C  rows g, g + 8          columns 2c, 2c + 1               (4 floats)
// The order of k is free as long as A and B agree, so a lane may take 16 bytes in a row (k 8c .. 8c + 7 of
// a 32-wide strip) as the fragments of two steps: operands then come straight from memory, no shared memory.
#pragma once
#include "overlap.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace pagemill {

constexpr float LOG2_E = 1.4426950408889634f;

/// bf16 elements: conversion, packing, and the tensor-core step.
struct Bf16 {
    using Element = __nv_bfloat16;
    static constexpr bool IS_BF16 = true;
    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        uint32_t out;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
        return out;
    }
    static __device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
    static __device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
    static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    static __device__ __forceinline__ Element from_float(float x) { return __float2bfloat16(x); }
    static __device__ __forceinline__ float to_float(Element x) { return __bfloat162float(x); }
};

/// f16 elements, same face as `Bf16`.
struct F16 {
    using Element = __half;
    static constexpr bool IS_BF16 = false;
    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        uint32_t out;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
        return out;
    }
    static __device__ __forceinline__ float low(uint32_t pair) {
        return __half2float(__ushort_as_half(static_cast<unsigned short>(pair & 0xffffu)));
    }
    static __device__ __forceinline__ float high(uint32_t pair) {
        return __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)));
    }
    static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    static __device__ __forceinline__ Element from_float(float x) { return __float2half(x); }
    static __device__ __forceinline__ float to_float(Element x) { return __half2float(x); }
};

/// How an activation buffer is stored; the value the host passes.
enum ActivationType : uint32_t { ACT_F32 = 0, ACT_F16 = 1, ACT_BF16 = 2 };

/// Element `idx` of an activation buffer, as f32.
__device__ __forceinline__ float load_activation(const void* base, size_t idx, uint32_t type) {
    if (type == ACT_F32) return static_cast<const float*>(base)[idx];
    if (type == ACT_F16) return __half2float(static_cast<const __half*>(base)[idx]);
    return __bfloat162float(static_cast<const __nv_bfloat16*>(base)[idx]);
}

/// Two 16-bit elements of an activation buffer as elements of T.
template <class T> __device__ __forceinline__ uint32_t pair_as(uint32_t pair, uint32_t type) {
    if (type == ACT_BF16 && !T::IS_BF16) return T::pack(Bf16::low(pair), Bf16::high(pair));
    if (type == ACT_F16 && T::IS_BF16) return T::pack(F16::low(pair), F16::high(pair));
    return pair;
}

/// The same of eight.
template <class T> __device__ __forceinline__ uint4 eight_as(uint4 x, uint32_t type) {
    return make_uint4(pair_as<T>(x.x, type), pair_as<T>(x.y, type), pair_as<T>(x.z, type), pair_as<T>(x.w, type));
}

/// Eight f32 elements of an activation buffer as elements of T; 16 bytes each.
template <class T> __device__ __forceinline__ uint4 eight_f32_as(const float* from) {
    const float4 a = *reinterpret_cast<const float4*>(from), b = *reinterpret_cast<const float4*>(from + 4);
    return make_uint4(T::pack(a.x, a.y), T::pack(a.z, a.w), T::pack(b.x, b.y), T::pack(b.z, b.w));
}

/// Stores f32 `x` as element `idx` of an activation buffer.
__device__ __forceinline__ void store_activation(void* base, size_t idx, uint32_t type, float x) {
    if (type == ACT_F32) static_cast<float*>(base)[idx] = x;
    else if (type == ACT_F16) static_cast<__half*>(base)[idx] = __float2half(x);
    else static_cast<__nv_bfloat16*>(base)[idx] = __float2bfloat16(x);
}

/// A gated layer's activation; the value the host passes.
enum GateActivation : uint32_t { GATE_SILU = 0, GATE_GELU_TANH = 1 };

__device__ __forceinline__ float gate_activation(float x, uint32_t which) {
    if (which == GATE_SILU) return x / (1.0f + __expf(-x));
    return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

// Loads of data that is read once (weights, KV): they bypass L1, and stay in program order among themselves.
__device__ __forceinline__ uint4 stream16(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 stream8(const void* p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
__device__ __forceinline__ uint32_t stream4(const void* p) {
    uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

/// `stream16` where `wanted`, else zeros without touching memory.
__device__ __forceinline__ uint4 stream16_if(const void* p, bool wanted) {
    uint4 v;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;"
                 " @p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4]; }"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(p), "r"(static_cast<uint32_t>(wanted)));
    return v;
}
/// A cached 16-byte load where `wanted`, else zeros: activations, which every thread block reads. Not `.nc`: under
/// programmatic dependent launch they are written while the kernel that reads them is already there.
__device__ __forceinline__ uint4 cached16_if(const void* p, bool wanted) {
    uint4 v;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;"
                 " @p ld.global.v4.u32 {%0,%1,%2,%3}, [%4]; }"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(p), "r"(static_cast<uint32_t>(wanted)));
    return v;
}

/// Transposes an 8 × 8 matrix of 16-bit elements held as a fragment (row g, columns 2c and 2c + 1).
__device__ __forceinline__ uint32_t transpose8x8(uint32_t fragment) {
    uint32_t out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(fragment));
    return out;
}

/// Four 8 × 8 matrices from shared memory, one row address a lane (lanes 8i .. 8i + 7 those of matrix i).
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_row));
}
/// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_row));
}

/// 16 bytes to shared memory in the background; zeros where not `wanted` (`from` must still be an address).
__device__ __forceinline__ void copy16_async(uint32_t shared_to, const void* from, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_to), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

} // namespace pagemill
