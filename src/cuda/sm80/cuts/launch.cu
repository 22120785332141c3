#include <algorithm>

#include "cuda/host/device.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/sm80/cuts/kernel.cuh"

namespace flashqla::cuda::sm80 {

Status launch_cuts(const char* function, const CutsParams& params, int device, Stream stream) noexcept {
    constexpr std::uint32_t kBlocksEach = 4;
    const int all = gpus().list[static_cast<std::size_t>(device)].multiprocessors;
    const std::uint32_t blocks = std::min(params.items, kBlocksEach * static_cast<std::uint32_t>(all));
    return launch({function, "cuts", device, stream}, {blocks, kCutsThreads, 0, true}, &cuts_kernel, params);
}

}  // namespace flashqla::cuda::sm80
