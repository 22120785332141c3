// One function for each type of q, k and v, each in a file of its own.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/sm80/chunk/params.hpp"

namespace flashqla::cuda::sm80 {

Status launch_chunks_bf16(const LaunchSite& site, const ChunkParams& params) noexcept;
Status launch_chunks_f16(const LaunchSite& site, const ChunkParams& params) noexcept;
Status launch_chunks_f32(const LaunchSite& site, const ChunkParams& params) noexcept;

}  // namespace flashqla::cuda::sm80
