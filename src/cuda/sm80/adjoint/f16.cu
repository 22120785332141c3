#include "cuda/sm80/adjoint/launch.cuh"

namespace flashqla::cuda::sm80 {

Status launch_adjoints_f16(const LaunchSite& site, const AdjointParams& params) noexcept {
    return launch_adjoints_of<F16Operand>(site, params);
}

}  // namespace flashqla::cuda::sm80
