#include "cuda/host/launch.hpp"
#include "cuda/sm80/table/kernel.cuh"

namespace flashqla::cuda::sm80 {

Status launch_table(const char* function, const TableParams& params, int device, Stream stream) noexcept {
    return launch({function, "table", device, stream}, {1, kTableThreads, sizeof(TableShared)}, &table_kernel, params);
}

}  // namespace flashqla::cuda::sm80
