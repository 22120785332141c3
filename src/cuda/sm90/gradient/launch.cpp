#include "cuda/sm90/gradient/operands.hpp"

namespace flashqla::cuda::sm90 {

Status launch_gradients(const char* function, const GradientParams& params, std::int64_t chunks, int device,
                        Stream stream) noexcept {
    const LaunchSite site{function, "gradient", device, stream};
    const auto items = static_cast<std::uint32_t>(chunks * params.call.problem.heads_k);
    return params.call.problem.io == DType::f16 ? launch_gradients_f16(site, params, items)
                                                : launch_gradients_bf16(site, params, items);
}

}  // namespace flashqla::cuda::sm90
