// Shared memory whose size the launch gives.
#pragma once

namespace flashqla::cuda {

template <class T>
__device__ __forceinline__ T& shared_block() {
    extern __shared__ uint4 memory[];
    return *reinterpret_cast<T*>(memory);
}

// The same for tiles that the asynchronous matrix units read, which lie at multiples of 1,024 bytes.
template <class T>
__device__ __forceinline__ T& aligned_shared_block() {
    extern __shared__ __align__(1024) char aligned_memory[];
    return *reinterpret_cast<T*>(aligned_memory);
}

}  // namespace flashqla::cuda
