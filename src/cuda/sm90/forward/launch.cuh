// Picks the kernel by the size of K and the mode; a file for each type of operands compiles it.
#pragma once

#include <algorithm>

#include "cuda/host/device.hpp"
#include "cuda/sm90/forward/kernel.cuh"
#include "cuda/sm90/forward/operands.hpp"

namespace flashqla::cuda::sm90 {

template <class Op>
Status launch_forward_of(const LaunchSite& site, const ForwardParams& params) noexcept {
    using Config = ForwardConfig<Op, 128>;
    const auto places = static_cast<std::uint32_t>(gpus().list[static_cast<std::size_t>(site.device)].multiprocessors);
    const LaunchShape shape{std::min(params.segment_blocks, places), Config::kThreads, sizeof(ForwardShared<Config>),
                            true};
    return params.mode == ChunkMode::ends ? launch(site, shape, &forward_kernel<Config, ChunkMode::ends>, params)
                                          : launch(site, shape, &forward_kernel<Config, ChunkMode::outputs>, params);
}

}  // namespace flashqla::cuda::sm90
