#include "cuda/sm90/adjoint/launch.cuh"

namespace flashqla::cuda::sm90 {

Status launch_adjoints_bf16(const LaunchSite& site, const AdjointParams& params) noexcept {
    return launch_adjoints_of<Bf16Operand>(site, params);
}

}  // namespace flashqla::cuda::sm90
