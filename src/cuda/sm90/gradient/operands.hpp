// One function for each type of operands, a file each.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/sm90/gradient/params.hpp"

namespace flashqla::cuda::sm90 {

// `items`: chunks (a bound) times key heads.
Status launch_gradients_bf16(const LaunchSite& site, const GradientParams& params, std::uint32_t items) noexcept;
Status launch_gradients_f16(const LaunchSite& site, const GradientParams& params, std::uint32_t items) noexcept;

}  // namespace flashqla::cuda::sm90
