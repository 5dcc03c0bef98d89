// Thread blocks of a kernel as a cluster: their barriers and each other's shared memory. Decides nothing.
#pragma once
#include "warpgroup.cuh"

namespace pagemill {

/// Says that this thread's barriers are ready for the others; to be followed by `await_cluster`.
__device__ __forceinline__ void announce_to_cluster() {
    asm volatile("fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void await_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

/// The address of thread block `rank`'s `p`, where `p` is this one's.
__device__ __forceinline__ uint32_t address_at(const void* p, uint32_t rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
    return there;
}
// No scope is asked for: a release for the cluster waits for all of a thread's memory, a microsecond.
__device__ __forceinline__ void barrier_arrive_at(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
/// 16 bytes to another's memory; its barrier counts them.
__device__ __forceinline__ void send16(uint32_t to, float4 v, uint32_t bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar) : "memory");
}
/// As `barrier_wait`, where others arrived or sent.
__device__ __forceinline__ void barrier_wait_for_cluster(uint64_t* bar, uint32_t parity) {
    asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1; @!done bra again; }"
                 ::"r"(shared_address(bar)), "r"(parity) : "memory");
}

} // namespace pagemill
