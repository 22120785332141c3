#include "cuda/sm90/chunk/launch.cuh"

namespace flashqla::cuda::sm90 {

Status launch_chunks_f16(const LaunchSite& site, const ChunkParams& params) noexcept {
    return launch_chunks_of<F16Operand>(site, params);
}

}  // namespace flashqla::cuda::sm90
