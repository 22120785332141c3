// Picks the kernel by the size of K and of a tile of V; a file for each operand compiles it.
#pragma once

#include "cuda/sm80/gradient/kernel.cuh"
#include "cuda/sm80/gradient/operands.hpp"

namespace flashqla::cuda::sm80 {

template <class Op, int kK, int kColumns>
Status launch_gradients_tile(const LaunchSite& site, const GradientParams& params, std::uint32_t blocks) noexcept {
    using Config = GradientConfig<Op, kK, kColumns>;
    return launch(site, {blocks, Config::kThreads, gradient_bytes<Config>(params.stages)}, &gradient_kernel<Config>,
                  params);
}

template <class Op>
Status launch_gradients_of(const LaunchSite& site, const GradientParams& params, std::uint32_t blocks) noexcept {
    const int width = chunk_width(params.call.problem.dim_k);
    if constexpr (Op::kParts == 1) {
        if (width == 64) return launch_gradients_tile<Op, 64, 64>(site, params, blocks);
        if (width == 256) return launch_gradients_tile<Op, 256, 32>(site, params, blocks);
        return params.columns == 64 ? launch_gradients_tile<Op, 128, 64>(site, params, blocks)
                                    : launch_gradients_tile<Op, 128, 32>(site, params, blocks);
    } else {
        if (width == 64) return launch_gradients_tile<Op, 64, 32>(site, params, blocks);
        if (width == 128) return launch_gradients_tile<Op, 128, 32>(site, params, blocks);
        return launch_gradients_tile<Op, 256, 16>(site, params, blocks);
    }
}

}  // namespace flashqla::cuda::sm80
