#include <algorithm>

#include "cuda/sm80/prepare/operands.hpp"

namespace flashqla::cuda::sm80 {

Status launch_prepare(const char* function, const PrepareParams& params, std::int64_t chunks, int device,
                      Stream stream) noexcept {
    const LaunchSite site{function, "prepare", device, stream};
    PrepareParams even = params;
    even.group = params.in.group();
    even.share = std::min(params.share, kMostPreparedHeads);
    even.share = static_cast<std::int32_t>(pieces(even.group, pieces(even.group, even.share)));
    const std::int64_t shares = pieces(even.group, even.share);
    even.shares = Divider(static_cast<std::uint32_t>(shares));
    even.key_heads = Divider(static_cast<std::uint32_t>(params.in.problem.heads_k));
    const std::int64_t blocks = chunks * params.in.problem.heads_k * shares;
    switch (params.in.problem.io) {
        case DType::f32: return launch_prepare_f32(site, even, blocks);
        case DType::f16: return launch_prepare_f16(site, even, blocks);
        default: return launch_prepare_bf16(site, even, blocks);
    }
}

}  // namespace flashqla::cuda::sm80
