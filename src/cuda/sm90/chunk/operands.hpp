// One function for each type of operands, a file each.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/sm90/chunk/params.hpp"

namespace flashqla::cuda::sm90 {

Status launch_chunks_bf16(const LaunchSite& site, const ChunkParams& params) noexcept;
Status launch_chunks_f16(const LaunchSite& site, const ChunkParams& params) noexcept;

}  // namespace flashqla::cuda::sm90
