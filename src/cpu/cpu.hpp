// The CPU backend: chunked SIMD kernels with run-time dispatch, threads by OpenMP.
#pragma once

#include "base/backend.hpp"

namespace flashqla {

extern const Backend kCpuBackend;

}  // namespace flashqla
