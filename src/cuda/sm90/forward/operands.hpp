// One function for each type of operands, a file each.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/sm90/forward/params.hpp"

namespace flashqla::cuda::sm90 {

Status launch_forward_bf16(const LaunchSite& site, const ForwardParams& params) noexcept;

}  // namespace flashqla::cuda::sm90
