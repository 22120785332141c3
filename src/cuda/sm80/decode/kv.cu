#include "cuda/sm80/decode/launch.cuh"

namespace flashqla::cuda::sm80 {

Status launch_decode_kv(const LaunchSite& site, const DecodeCall& call) noexcept {
    return launch_decode_layout<false>(site, call);
}

}  // namespace flashqla::cuda::sm80
