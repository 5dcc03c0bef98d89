// Programmatic dependent launch: a kernel may begin while the one before it on the stream still runs. Every kernel
// that is launched so waits before it reads what another one writes, and before it writes: before its wait it reads
// weights, and what was there before the step (plans, block tables, keys of earlier steps). It lets its successor begin
// behind that wait, so that no more than two kernels are there at once, but for row-wise ops (rows.cu, planes.cu) and
// heads on their way to the pool (rope_kv.cu), which let it begin at once: they are over soon, and what follows them has
// much to ask of memory meanwhile. Its own wait is for them, and theirs for what is in front of them.
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
