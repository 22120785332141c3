// In the place of src/cuda/device/shared_memory.cuh.
#pragma once

#include "block.hpp"

namespace flashqla::cuda {

template <class T>
T& shared_block() {
    static_assert(alignof(T) <= 128);
    return *reinterpret_cast<T*>(emulator::shared_memory);
}

template <class T>
T& aligned_shared_block() {
    static_assert(alignof(T) <= 1024);
    return *reinterpret_cast<T*>(emulator::shared_memory);
}

}  // namespace flashqla::cuda
