// The one way a kernel is launched.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "cuda/host/device.hpp"
#include "cuda/host/error.hpp"

namespace flashqla::cuda {

struct LaunchSite {
    const char* function;  // of the API, for error sentences
    const char* kernel;
    int device;
    Stream stream;
};

struct LaunchShape {
    std::uint32_t blocks = 0, threads = 0;  // no blocks: nothing is launched
};

// NOTE: also reports an error that an earlier kernel of the process left behind; CUDA keeps such an error and gives it
// to whoever calls next.
template <class... Params>
Status launch(const LaunchSite& site, LaunchShape shape, void (*kernel)(Params...),
              const std::type_identity_t<Params>&... params) noexcept {
    if (shape.blocks == 0) return {};
    const CurrentDevice current(site.device);
    if (current.error() != cudaSuccess) {
        return status_of(static_cast<cudaError_t>(current.error()), site.function, "choosing the GPU for", site.kernel,
                         site.device);
    }
    const void* pointers[] = {&params...};
    const cudaError_t error =
        cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(shape.blocks), dim3(shape.threads),
                         const_cast<void**>(pointers), 0, static_cast<cudaStream_t>(site.stream.handle));
    return status_of(error, site.function, "launching the kernel", site.kernel, site.device);
}

}  // namespace flashqla::cuda
