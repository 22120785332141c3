#include "cuda/sm80/chunk/launch.cuh"

namespace flashqla::cuda::sm80 {

Status launch_chunks_f32(const LaunchSite& site, const ChunkParams& params) noexcept {
    return launch_chunks_of<F32Operand>(site, params);
}

}  // namespace flashqla::cuda::sm80
