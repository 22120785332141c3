#include "cuda/sm80/gradient/launch.cuh"

namespace flashqla::cuda::sm80 {

Status launch_gradients_bf16(const LaunchSite& site, const GradientParams& params, std::uint32_t blocks) noexcept {
    return launch_gradients_of<Bf16Operand>(site, params, blocks);
}

}  // namespace flashqla::cuda::sm80
