// The CUDA backends.
#pragma once

#include "base/backend.hpp"

namespace flashqla {

// One set of kernels for every GPU from sm_80 on.
extern const Backend kCudaSm80Backend;

}  // namespace flashqla
