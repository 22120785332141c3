// The one way a kernel is launched. NOTE: every kernel waits itself for what is before it in the stream
// (device/grid_order.cuh), so its blocks may come while that ends.
#pragma once

#include <cstddef>
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

// `arguments`: where each of the kernel's lies.
Status launch(const LaunchSite& site, const LaunchShape& shape, const void* kernel, void** arguments) noexcept;

// NOTE: also reports an error that an earlier kernel of the process left behind; CUDA keeps such an error and gives it
// to whoever calls next.
template <class... Params>
Status launch(const LaunchSite& site, const LaunchShape& shape, void (*kernel)(Params...),
              const std::type_identity_t<Params>&... params) noexcept {
    const void* pointers[] = {&params...};
    return launch(site, shape, reinterpret_cast<const void*>(kernel), const_cast<void**>(pointers));
}

}  // namespace flashqla::cuda
