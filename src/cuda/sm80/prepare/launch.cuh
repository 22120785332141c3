// Picks the kernel by the size of K; a file for each operand compiles it.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/sm80/prepare/kernel.cuh"

namespace flashqla::cuda::sm80 {

template <class Op, int kK>
Status launch_prepare_width(const LaunchSite& site, const PrepareParams& params, std::int64_t blocks) noexcept {
    using Config = PrepareConfig<Op, kK>;
    return launch(site, {static_cast<std::uint32_t>(blocks), Config::kThreads, sizeof(PrepareShared<Config>)},
                  &prepare_kernel<Config>, params);
}

template <class Op>
Status launch_prepare_of(const LaunchSite& site, const PrepareParams& params, std::int64_t blocks) noexcept {
    switch (chunk_width(params.in.problem.dim_k)) {
        case 64: return launch_prepare_width<Op, 64>(site, params, blocks);
        case 128: return launch_prepare_width<Op, 128>(site, params, blocks);
        default: return launch_prepare_width<Op, 256>(site, params, blocks);
    }
}

}  // namespace flashqla::cuda::sm80
