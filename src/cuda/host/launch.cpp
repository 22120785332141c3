#include "cuda/host/launch.hpp"

#include <cuda_runtime_api.h>

#include "cuda/host/grants.hpp"

namespace flashqla::cuda {
namespace {

constinit SharedMemoryGrants grants;

}  // namespace

Status launch(const LaunchSite& site, const LaunchShape& shape, const void* kernel, void** arguments) noexcept {
    if (shape.blocks == 0) return {};
    const CurrentDevice current(site.device);
    if (current.error() != cudaSuccess) {
        return status_of(static_cast<cudaError_t>(current.error()), site.function, "choosing the GPU for", site.kernel,
                         site.device);
    }
    cudaError_t error = cudaSuccess;
    const SharedMemoryGrants::Outcome outcome = grants.launch(
        kernel, site.device, shape.shared_bytes, cudaErrorInvalidValue,
        [&](std::size_t bytes) {
            // NOTE: the runtime would keep the error of the launch that is tried again.
            if (error != cudaSuccess) (void)cudaGetLastError();
            error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
            return error;
        },
        [&] {
            cudaLaunchAttribute attribute;
            attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
            attribute.val.programmaticStreamSerializationAllowed = 1;
            cudaLaunchConfig_t config{};
            config.gridDim = dim3(shape.blocks);
            config.blockDim = dim3(shape.threads);
            config.dynamicSmemBytes = shape.shared_bytes;
            config.stream = static_cast<cudaStream_t>(site.stream.handle);
            config.attrs = &attribute;
            config.numAttrs = gpus().list[static_cast<std::size_t>(site.device)].grids_wait ? 1 : 0;
            error = cudaLaunchKernelExC(&config, kernel, arguments);
            return error;
        });
    return status_of(error, site.function,
                     outcome.of_asking ? "reserving shared memory for the kernel" : "launching the kernel", site.kernel,
                     site.device);
}

}  // namespace flashqla::cuda
