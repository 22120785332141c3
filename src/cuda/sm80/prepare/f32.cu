#include "cuda/sm80/prepare/launch.cuh"
#include "cuda/sm80/prepare/operands.hpp"

namespace flashqla::cuda::sm80 {

Status launch_prepare_f32(const LaunchSite& site, const PrepareParams& params, std::int64_t blocks) noexcept {
    return launch_prepare_of<F32Operand>(site, params, blocks);
}

}  // namespace flashqla::cuda::sm80
