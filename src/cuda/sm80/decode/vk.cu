#include "cuda/sm80/decode/launch.cuh"

namespace flashqla::cuda::sm80 {

Status launch_decode_vk(const LaunchSite& site, const DecodeCall& call) noexcept {
    return launch_decode_layout<true>(site, call);
}

}  // namespace flashqla::cuda::sm80
