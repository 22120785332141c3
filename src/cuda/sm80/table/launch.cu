#include <algorithm>

#include "cuda/host/device.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/sm80/table/kernel.cuh"

namespace flashqla::cuda::sm80 {

Status launch_table(const char* function, const TableParams& params, int device, Stream stream) noexcept {
    const auto places = static_cast<std::int64_t>(gpus().list[static_cast<std::size_t>(device)].multiprocessors);
    const std::int64_t blocks = params.windows ? std::min(params.most_segments * params.in.problem.heads_v, places) : 1;
    return launch({function, "table", device, stream},
                  {static_cast<std::uint32_t>(blocks), kTableThreads, sizeof(TableShared), true}, &table_kernel,
                  params);
}

}  // namespace flashqla::cuda::sm80
