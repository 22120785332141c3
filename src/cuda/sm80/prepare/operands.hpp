// One function for each type of q, k and v, each in a file of its own.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/sm80/prepare/params.hpp"

namespace flashqla::cuda::sm80 {

Status launch_prepare_bf16(const LaunchSite& site, const PrepareParams& params, std::int64_t blocks) noexcept;
Status launch_prepare_f16(const LaunchSite& site, const PrepareParams& params, std::int64_t blocks) noexcept;
Status launch_prepare_f32(const LaunchSite& site, const PrepareParams& params, std::int64_t blocks) noexcept;

}  // namespace flashqla::cuda::sm80
