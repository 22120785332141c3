// The gradients of q, k, g and beta on Hopper: what sm80's kernel does, for operands of 16 bits and up to 128 keys.
#pragma once

#include "cuda/sm80/gradient/params.hpp"

namespace flashqla::cuda::sm90 {

using sm80::GradientParams;

constexpr bool has_gradient_kernel(const Problem& p) noexcept { return p.io != DType::f32 && p.dim_k <= 128; }

// `stages` and `columns` of the parameters have no meaning here.
Status launch_gradients(const char* function, const GradientParams& params, std::int64_t chunks, int device,
                        Stream stream) noexcept;

}  // namespace flashqla::cuda::sm90
