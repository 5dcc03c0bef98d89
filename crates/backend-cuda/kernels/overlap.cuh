// Programmatic dependent launch: a kernel may begin while the one before it on the stream still runs. Every kernel
// that is launched so waits before it reads what another one writes, and before it writes. It lets its successor
// begin only behind that wait, so that what lies before the last but one is always done (heads on their way to the
// pool are the exception: rope_kv.cu says why).
#pragma once

namespace pagemill {

/// Waits until the kernel before this one in the stream is done (programmatic dependent launch); free when
/// the launch did not ask for overlap.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel in the stream start its prologue once every thread block has said so.
__device__ __forceinline__ void release_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

} // namespace pagemill
