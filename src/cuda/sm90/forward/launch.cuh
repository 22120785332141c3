// Picks the kernel by the size of K and the mode; a file for each type of operands compiles it.
#pragma once

#include "cuda/sm90/forward/kernel.cuh"
#include "cuda/sm90/forward/operands.hpp"

namespace flashqla::cuda::sm90 {

template <class Op>
Status launch_forward_of(const LaunchSite& site, const ForwardParams& params) noexcept {
    using Config = ForwardConfig<Op, 128>;
    const LaunchShape shape{params.segment_blocks + params.zero_blocks, Config::kThreads,
                            sizeof(ForwardShared<Config>)};
    return params.mode == ChunkMode::ends ? launch(site, shape, &forward_kernel<Config, ChunkMode::ends>, params)
                                          : launch(site, shape, &forward_kernel<Config, ChunkMode::outputs>, params);
}

}  // namespace flashqla::cuda::sm90
