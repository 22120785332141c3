#include "cuda/sm80/recurrent/launch.cuh"

namespace flashqla::cuda::sm80 {

Status launch_recurrent(const DecodeCall& call, const RecurrentGrid& grid, int device, Stream stream) noexcept {
    return launch_call("flashqla::decode", call, grid, device, stream);
}

}  // namespace flashqla::cuda::sm80
