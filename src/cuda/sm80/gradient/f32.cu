#include "cuda/sm80/gradient/launch.cuh"

namespace flashqla::cuda::sm80 {

Status launch_gradients_f32(const LaunchSite& site, const GradientParams& params, std::uint32_t blocks) noexcept {
    return launch_gradients_of<F32Operand>(site, params, blocks);
}

}  // namespace flashqla::cuda::sm80
