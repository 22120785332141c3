// What CUDA keeps of each block's shared memory; a kernel's own begins behind it.
#pragma once

namespace flashqla::cuda {

inline constexpr int kReservedSharedBytes = 1024;  // Hopper's kernels rely on it (device/shared_memory.cuh)

}  // namespace flashqla::cuda
