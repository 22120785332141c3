#include "cuda/host/launch.hpp"
#include "cuda/sm80/carry/kernel.cuh"
#include "cuda/sm80/prepare/params.hpp"

namespace flashqla::cuda::sm80 {
namespace {

template <int kK>
Status launch_width(const LaunchSite& site, const CarryParams& params) noexcept {
    using Config = CarryConfig<kK>;
    const Problem& p = params.in.problem;
    const std::int64_t tiles = (p.dim_v + Config::kRows - 1) / Config::kRows;
    const auto blocks = static_cast<std::uint32_t>(params.in.count * p.heads_v * tiles);
    const LaunchShape shape{blocks, Config::kThreads, sizeof(CarryShared<Config>)};
    return params.adjoints.starts ? launch(site, shape, &carry_kernel<Config, true>, params)
                                  : launch(site, shape, &carry_kernel<Config, false>, params);
}

}  // namespace

Status launch_carry(const char* function, const CarryParams& params, int device, Stream stream) noexcept {
    const LaunchSite site{function, "carry", device, stream};
    switch (chunk_width(params.in.problem.dim_k)) {
        case 64: return launch_width<64>(site, params);
        case 128: return launch_width<128>(site, params);
        default: return launch_width<256>(site, params);
    }
}

}  // namespace flashqla::cuda::sm80
