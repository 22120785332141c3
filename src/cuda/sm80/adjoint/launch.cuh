// Picks the kernel by the size of K; a file for each operand compiles it.
#pragma once

#include "cuda/sm80/adjoint/kernel.cuh"
#include "cuda/sm80/adjoint/operands.hpp"

namespace flashqla::cuda::sm80 {

template <class Op, int kK>
Status launch_adjoints_width(const LaunchSite& site, const AdjointParams& params) noexcept {
    using Config = AdjointConfig<Op, kK>;
    const LaunchShape shape{params.blocks, Config::kThreads, params.stages * sizeof(AdjointStage<Config>)};
    return launch(site, shape, &adjoint_kernel<Config>, params);
}

template <class Op>
Status launch_adjoints_of(const LaunchSite& site, const AdjointParams& params) noexcept {
    switch (chunk_width(params.call.problem.dim_k)) {
        case 64: return launch_adjoints_width<Op, 64>(site, params);
        case 128: return launch_adjoints_width<Op, 128>(site, params);
        default: return launch_adjoints_width<Op, 256>(site, params);
    }
}

}  // namespace flashqla::cuda::sm80
