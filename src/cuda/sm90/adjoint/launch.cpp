#include "cuda/sm90/adjoint/operands.hpp"

namespace flashqla::cuda::sm90 {

Status launch_adjoints(const char* function, const AdjointParams& params, int device, Stream stream) noexcept {
    const LaunchSite site{function, "adjoint", device, stream};
    return params.call.problem.io == DType::f16 ? launch_adjoints_f16(site, params)
                                                : launch_adjoints_bf16(site, params);
}

}  // namespace flashqla::cuda::sm90
