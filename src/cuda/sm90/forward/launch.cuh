// How the kernel is launched; a file for each type of operands compiles it.
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
    // NOTE: where sequences may be cut, there may be more items than those of outputs.
    const std::uint32_t blocks = params.states.starts ? places : std::min(params.segment_blocks, places);
    const LaunchShape shape{blocks, Config::kThreads, sizeof(ForwardShared<Config>)};
    return launch(site, shape, &forward_kernel<Config>, params);
}

}  // namespace flashqla::cuda::sm90
