#include "cuda/host/launch.hpp"
#include "cuda/sm80/commit/kernel.cuh"

namespace flashqla::cuda::sm80 {

Status launch_commit(const CommitCall& call, std::uint32_t parts, std::uint32_t blocks, int device,
                     Stream stream) noexcept {
    const LaunchSite site{"flashqla::commit", "commit", device, stream};
    return launch(site, {blocks, kCommitThreads}, &commit_kernel, call, parts);
}

}  // namespace flashqla::cuda::sm80
