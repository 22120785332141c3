// CUDA's errors as values.
#pragma once

#include <cuda_runtime_api.h>

#include "flashqla/flashqla.hpp"

namespace flashqla::cuda {

// "flashqla::forward: launching the kernel recurrent on cuda:0 failed: ..."; ok for cudaSuccess. Never throws: where
// there is no memory for the sentence, a shorter one that exists already says it.
Status status_of(cudaError_t error, const char* function, const char* action, const char* object, int device) noexcept;

}  // namespace flashqla::cuda
