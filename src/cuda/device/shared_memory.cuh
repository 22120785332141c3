// Shared memory whose size the launch gives.
#pragma once

#include "cuda/reserved.hpp"

namespace flashqla::cuda {

template <class T>
__device__ __forceinline__ T& shared_block() {
    extern __shared__ uint4 memory[];
    return *reinterpret_cast<T*>(memory);
}

// The same for tiles that the asynchronous matrix units read, which lie at multiples of 1,024 bytes; on GPUs that
// reserve so much of a block's shared memory (GpuInfo::hopper), for kernels that declare none of their own.
//
// NOTE: as a number, which is a part of instructions. As a symbol it is a register of each thread, or a load from local
// memory wherever there is none left.
template <class T>
__device__ __forceinline__ T& aligned_shared_block() {
    constexpr unsigned kBegin = kReservedSharedBytes;
    extern __shared__ __align__(1024) char aligned_memory[];
    if (threadIdx.x == 0 && static_cast<unsigned>(__cvta_generic_to_shared(aligned_memory)) != kBegin) __trap();
    return *static_cast<T*>(__cvta_shared_to_generic(kBegin));
}

}  // namespace flashqla::cuda
