// Picks the kernel by the size of K and the columns of a block; a file for each operand compiles it.
#pragma once

#include "cuda/sm90/adjoint/kernel.cuh"
#include "cuda/sm90/adjoint/operands.hpp"

namespace flashqla::cuda::sm90 {

template <class Config>
Status launch_adjoints_config(const LaunchSite& site, const AdjointParams& params) noexcept {
    const LaunchShape shape{params.blocks, Config::kThreads, sizeof(AdjointShared<Config>)};
    return launch(site, shape, &adjoint_kernel<Config>, params);
}

template <class Op, int kK>
Status launch_adjoints_width(const LaunchSite& site, const AdjointParams& params) noexcept {
    return params.columns == 128 ? launch_adjoints_config<AdjointConfig<Op, kK, 128>>(site, params)
                                 : launch_adjoints_config<AdjointConfig<Op, kK, 64>>(site, params);
}

template <class Op>
Status launch_adjoints_of(const LaunchSite& site, const AdjointParams& params) noexcept {
    return params.call.problem.dim_k <= 64 ? launch_adjoints_width<Op, 64>(site, params)
                                           : launch_adjoints_width<Op, 128>(site, params);
}

}  // namespace flashqla::cuda::sm90
