// A kernel that waits itself for what is before it in the stream, instead of being held back: its blocks come, and do
// what depends on nothing, while the kernel before ends (programmatic dependent launch, from compute capability 9.0
// on). Every kernel begins so: the host launches all of them in this way, and launching is then sooner done.
#pragma once

namespace flashqla::cuda {

// Until all earlier kernels have ended and what they wrote can be seen. NOTE: by every thread before it touches global
// memory, reading or writing.
__device__ __forceinline__ void wait_for_earlier_grids() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel's blocks may come once all blocks of this one have said so or ended. NOTE: after the wait above, so
// that what was before this kernel has ended for the next one too. And not where blocks that come early would crowd on
// the multiprocessors that have room: with the prepare kernel, the table and the carry saying so to kernels of many
// blocks, calls of 256 tokens took 6 to 8 % longer and the backward pass of packed sequences 1 to 4 %.
__device__ __forceinline__ void let_next_grid_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace flashqla::cuda
