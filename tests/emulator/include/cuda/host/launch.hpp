// In the place of src/cuda/host/launch.hpp: the kernel has run when launch() returns, or is part of a graph.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>

#include "block.hpp"
#include "cuda/host/device.hpp"
#include "cuda/host/error.hpp"

namespace flashqla::cuda {

struct LaunchSite {
    const char* function;
    const char* kernel;
    int device;
    Stream stream;
};

struct LaunchShape {
    std::uint32_t blocks = 0, threads = 0;
    std::size_t shared_bytes = 0;
};

template <class... Params>
Status launch(const LaunchSite&, LaunchShape shape, void (*kernel)(Params...),
              const std::type_identity_t<Params>&... params) noexcept {
    if (shape.blocks > 0) {
        emulator::submit(
            shape.blocks, shape.threads, shape.shared_bytes,
            [kernel, copies = std::tuple<std::remove_cvref_t<Params>...>(params...)] { std::apply(kernel, copies); });
    }
    return {};
}

}  // namespace flashqla::cuda
