// One function for each type of operands, a file each.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/sm90/adjoint/params.hpp"

namespace flashqla::cuda::sm90 {

Status launch_adjoints_bf16(const LaunchSite& site, const AdjointParams& params) noexcept;
Status launch_adjoints_f16(const LaunchSite& site, const AdjointParams& params) noexcept;

}  // namespace flashqla::cuda::sm90
