// One function for each type of q, k and v, each in a file of its own.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/sm80/adjoint/params.hpp"

namespace flashqla::cuda::sm80 {

Status launch_adjoints_bf16(const LaunchSite& site, const AdjointParams& params) noexcept;
Status launch_adjoints_f16(const LaunchSite& site, const AdjointParams& params) noexcept;
Status launch_adjoints_f32(const LaunchSite& site, const AdjointParams& params) noexcept;

}  // namespace flashqla::cuda::sm80
