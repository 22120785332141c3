// Picks the kernel by the size of K; a file for each operand compiles it.
#pragma once

#include <algorithm>

#include "cuda/sm90/gradient/kernel.cuh"
#include "cuda/sm90/gradient/operands.hpp"

namespace flashqla::cuda::sm90 {

template <class Config>
Status launch_gradients_config(const LaunchSite& site, const GradientParams& params, std::uint32_t items) noexcept {
    const GpuInfo& gpu = gpus().list[static_cast<std::size_t>(site.device)];
    const std::uint32_t blocks = std::min(items, static_cast<std::uint32_t>(gpu.multiprocessors));
    return launch(site, {blocks, Config::kThreads, sizeof(GradientShared<Config>)}, &gradient_kernel<Config>, params,
                  items);
}

template <class Op>
Status launch_gradients_of(const LaunchSite& site, const GradientParams& params, std::uint32_t items) noexcept {
    return params.call.problem.dim_k <= 64 ? launch_gradients_config<GradientConfig<Op, 64>>(site, params, items)
                                           : launch_gradients_config<GradientConfig<Op, 128>>(site, params, items);
}

}  // namespace flashqla::cuda::sm90
