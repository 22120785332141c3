// Picks the kernel by the size of K and the columns of a block; a file for each operand compiles it.
#pragma once

#include "cuda/sm90/adjoint/kernel.cuh"
#include "cuda/sm90/adjoint/operands.hpp"

namespace flashqla::cuda::sm90 {

template <class Op>
Status launch_adjoints_of(const LaunchSite& site, const AdjointParams& params) noexcept {
    return with_walk_config<Op>(params.call.problem.dim_k, params.columns, [&]<class Config>() {
        const LaunchShape shape{params.blocks, Config::kThreads, sizeof(AdjointShared<Config>)};
        return launch(site, shape, &adjoint_kernel<Config>, params);
    });
}

}  // namespace flashqla::cuda::sm90
