// Shared memory whose size the launch gives.
#pragma once

namespace flashqla::cuda {

template <class T>
__device__ __forceinline__ T& shared_block() {
    extern __shared__ uint4 memory[];
    return *reinterpret_cast<T*>(memory);
}

}  // namespace flashqla::cuda
