// Two thread blocks of a kernel as a cluster: barriers of the other one, and boxes brought for both. Decides nothing.
#pragma once
#include "warpgroup.cuh"

namespace pagemill {

/// All threads of both thread blocks.
__device__ __forceinline__ void sync_pair() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
/// An arrival at the same barrier of thread block `peer` of the cluster.
__device__ __forceinline__ void barrier_arrive_at_peer(uint64_t* bar, uint32_t peer) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }"
                 ::"r"(shared_address(bar)), "r"(peer) : "memory");
}
/// As `copy_box`, to the same place of both thread blocks; each one's barrier counts the bytes.
__device__ __forceinline__ void copy_box_to_pair(void* to, const CUtensorMap* map, int column, int row, uint64_t* bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(shared_address(to)), "l"(map), "r"(column), "r"(row), "r"(shared_address(bar)), "h"(uint16_t(3)) : "memory");
}

} // namespace pagemill
