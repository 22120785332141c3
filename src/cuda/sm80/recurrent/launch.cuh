// Picks the kernel of a call. Included by the two files that compile kernels, one for each kind of call.
#pragma once

#include "cuda/host/launch.hpp"
#include "cuda/sm80/recurrent/kernel.cuh"
#include "cuda/sm80/recurrent/params.hpp"

namespace flashqla::cuda::sm80 {

template <bool kVFirst, int kK, class Call>
Status launch_width(const LaunchSite& site, const Call& call, const RecurrentGrid& grid) noexcept {
    using Config = RecurrentConfig<kVFirst, kK>;
    return launch(site, {grid.state_blocks + grid.zero_blocks, Config::kThreads}, &recurrent_kernel<Config, Call>, call,
                  grid);
}

template <bool kVFirst, class Call>
Status launch_layout(const LaunchSite& site, const Call& call, const RecurrentGrid& grid) noexcept {
    switch (recurrent_width(call.problem.dim_k)) {
        case 64: return launch_width<kVFirst, 64>(site, call, grid);
        case 128: return launch_width<kVFirst, 128>(site, call, grid);
        default: return launch_width<kVFirst, 256>(site, call, grid);
    }
}

template <class Call>
Status launch_call(const char* function, const Call& call, const RecurrentGrid& grid, int device,
                   Stream stream) noexcept {
    const LaunchSite site{function, "recurrent", device, stream};
    return call.problem.state_layout == StateLayout::vk ? launch_layout<true>(site, call, grid)
                                                        : launch_layout<false>(site, call, grid);
}

}  // namespace flashqla::cuda::sm80
