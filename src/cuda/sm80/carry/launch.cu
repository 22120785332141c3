#include <algorithm>

#include "cuda/host/launch.hpp"
#include "cuda/sm80/carry/kernel.cuh"
#include "cuda/sm80/prepare/params.hpp"

namespace flashqla::cuda::sm80 {
namespace {

template <class Config>
Status launch_config(const LaunchSite& site, CarryParams params, int multiprocessors) noexcept {
    const Problem& p = params.in.problem;
    // The registers of a multiprocessor are enough for 512 threads.
    const auto places = static_cast<std::uint32_t>(multiprocessors * (512 / Config::kThreads));
    params.items = static_cast<std::uint32_t>(params.in.count * p.heads_v * pieces(p.dim_v, Config::kRows));
    params.blocks = std::min(params.items, places);
    const LaunchShape shape{params.blocks, Config::kThreads, sizeof(CarryShared<Config>)};
    return params.adjoints.starts ? launch(site, shape, &carry_kernel<Config, true>, params)
                                  : launch(site, shape, &carry_kernel<Config, false>, params);
}

template <int kK>
Status launch_width(const LaunchSite& site, const CarryParams& params) noexcept {
    const int all = gpus().list[static_cast<std::size_t>(site.device)].multiprocessors;
    return carry_rows(params.in.problem, all) == 8 ? launch_config<CarryConfig<kK, 8>>(site, params, all)
                                                   : launch_config<CarryConfig<kK, 16>>(site, params, all);
}

}  // namespace

Status launch_carry(const char* function, CarryParams params, int device, Stream stream) noexcept {
    const LaunchSite site{function, "carry", device, stream};
    switch (chunk_width(params.in.problem.dim_k)) {
        case 64: return launch_width<64>(site, params);
        case 128: return launch_width<128>(site, params);
        default: return launch_width<256>(site, params);
    }
}

}  // namespace flashqla::cuda::sm80
