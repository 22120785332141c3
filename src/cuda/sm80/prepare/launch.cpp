#include "cuda/sm80/prepare/operands.hpp"

namespace flashqla::cuda::sm80 {

Status launch_prepare(const char* function, const PrepareParams& params, std::int64_t chunks, int device,
                      Stream stream) noexcept {
    const LaunchSite site{function, "prepare", device, stream};
    const std::int64_t shares = (params.in.group() + params.share - 1) / params.share;
    const std::int64_t blocks = chunks * params.in.problem.heads_k * shares;
    switch (params.in.problem.io) {
        case DType::f32: return launch_prepare_f32(site, params, blocks);
        case DType::f16: return launch_prepare_f16(site, params, blocks);
        default: return launch_prepare_bf16(site, params, blocks);
    }
}

}  // namespace flashqla::cuda::sm80
