#include "cuda/sm90/chunk/operands.hpp"

namespace flashqla::cuda::sm90 {

Status launch_chunks(const char* function, const ChunkParams& params, int device, Stream stream) noexcept {
    const LaunchSite site{function, "chunk", device, stream};
    return params.call.problem.io == DType::f16 ? launch_chunks_f16(site, params) : launch_chunks_bf16(site, params);
}

}  // namespace flashqla::cuda::sm90
