#include "cuda/sm90/forward/launch.cuh"

namespace flashqla::cuda::sm90 {

Status launch_forward_bf16(const LaunchSite& site, const ForwardParams& params) noexcept {
    return launch_forward_of<Bf16Operand>(site, params);
}

}  // namespace flashqla::cuda::sm90
