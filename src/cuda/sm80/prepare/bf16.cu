#include "cuda/sm80/prepare/launch.cuh"
#include "cuda/sm80/prepare/operands.hpp"

namespace flashqla::cuda::sm80 {

Status launch_prepare_bf16(const LaunchSite& site, const PrepareParams& params, std::int64_t blocks) noexcept {
    return launch_prepare_of<Bf16Operand>(site, params, blocks);
}

}  // namespace flashqla::cuda::sm80
