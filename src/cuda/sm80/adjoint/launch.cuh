// Picks the kernel by the size of K; a file for each operand compiles it.
#pragma once

#include "cuda/sm80/adjoint/kernel.cuh"
#include "cuda/sm80/adjoint/operands.hpp"

namespace flashqla::cuda::sm80 {

template <class Config>
Status launch_adjoints_config(const LaunchSite& site, const AdjointParams& params) noexcept {
    const LaunchShape shape{params.blocks, Config::kThreads, AdjointShared<Config>::bytes(params.stages)};
    return launch(site, shape, &adjoint_kernel<Config>, params);
}

template <class Op, int kK>
Status launch_adjoints_width(const LaunchSite& site, const AdjointParams& params) noexcept {
    if constexpr (Op::kParts == 1 && kK == 128) {
        if (params.split == 2) return launch_adjoints_config<AdjointConfig<Op, kK, 2>>(site, params);
    }
    return launch_adjoints_config<AdjointConfig<Op, kK, 1>>(site, params);
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
