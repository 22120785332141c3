#include "cuda/sm90/gradient/launch.cuh"

namespace flashqla::cuda::sm90 {

Status launch_gradients_bf16(const LaunchSite& site, const GradientParams& params, std::uint32_t items) noexcept {
    return launch_gradients_of<Bf16Operand>(site, params, items);
}

}  // namespace flashqla::cuda::sm90
