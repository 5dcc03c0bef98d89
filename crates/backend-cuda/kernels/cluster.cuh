// Thread blocks of a cluster: who is which, their barrier, and stores to each other's shared memory. Without a body
// on chips that have no clusters; kernels that use them are not launched there.
#pragma once
#include "fragments.cuh"

namespace pagemill {

/// This thread block's place in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}

/// Arrives at the cluster's barrier, with this thread's stores to shared memory visible to who waits there.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

/// Waits until all threads of the cluster have arrived.
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

/// The address of `p`, which lies in shared memory, as the thread block `rank` of the cluster has it.
__device__ __forceinline__ uint32_t address_in(const void* p, uint32_t rank) {
    uint32_t at = shared_address(p);
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(rank));
#endif
    return at;
}

/// Stores into the shared memory of the thread block `rank`, where this one has `to`.
__device__ __forceinline__ void store_to_rank(float* to, uint32_t rank, float4 x) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address_in(to, rank)), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
#endif
}
__device__ __forceinline__ void store_to_rank(float2* to, uint32_t rank, float2 x) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(address_in(to, rank)), "f"(x.x), "f"(x.y) : "memory");
#endif
}

} // namespace pagemill
