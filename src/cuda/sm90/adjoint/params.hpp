// The gradient of the state on its way back on Hopper: what sm80's kernel does, for operands of 16 bits and up to 128
// keys.
#pragma once

#include "cuda/sm80/adjoint/params.hpp"

namespace flashqla::cuda::sm90 {

using sm80::AdjointParams;

constexpr bool has_adjoint_kernel(const Problem& p) noexcept { return p.io != DType::f32 && p.dim_k <= 128; }

// `stages` and `split` of the parameters have no meaning here.
Status launch_adjoints(const char* function, const AdjointParams& params, int device, Stream stream) noexcept;

}  // namespace flashqla::cuda::sm90
