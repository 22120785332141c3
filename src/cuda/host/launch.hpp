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
    std::size_t shared_bytes = 0;           // dynamic shared memory of a block
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
    const auto* function = reinterpret_cast<const void*>(kernel);
    // More than this needs a permission, which a kernel has for each device; giving it again is cheap.
    constexpr std::size_t kWithoutAsking = 48 << 10;
    if (shape.shared_bytes > kWithoutAsking) {
        const cudaError_t refused = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                         static_cast<int>(shape.shared_bytes));
        if (refused != cudaSuccess) {
            return status_of(refused, site.function, "reserving shared memory for the kernel", site.kernel,
                             site.device);
        }
    }
    const void* pointers[] = {&params...};
    const cudaError_t error =
        cudaLaunchKernel(function, dim3(shape.blocks), dim3(shape.threads), const_cast<void**>(pointers),
                         shape.shared_bytes, static_cast<cudaStream_t>(site.stream.handle));
    return status_of(error, site.function, "launching the kernel", site.kernel, site.device);
}

}  // namespace flashqla::cuda
