// One function for each type of q, k and v, each in a file of its own.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/sm80/gradient/params.hpp"

namespace flashqla::cuda::sm80 {

Status launch_gradients_bf16(const LaunchSite& site, const GradientParams& params, std::uint32_t blocks) noexcept;
Status launch_gradients_f16(const LaunchSite& site, const GradientParams& params, std::uint32_t blocks) noexcept;
Status launch_gradients_f32(const LaunchSite& site, const GradientParams& params, std::uint32_t blocks) noexcept;

}  // namespace flashqla::cuda::sm80
