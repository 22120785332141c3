// The tensors of an instance once more, in a GPU's own memory: for timing, where nothing may move over the bus.
#pragma once

#include <memory>
#include <vector>

#include "cases/instance.hpp"

namespace flashqla::cases {

struct DeviceCopy {
    Instance instance;  // its arguments lie on the GPU, its `tensors` are still those of the host
    std::vector<std::shared_ptr<std::byte>> memory;
};

// `from` lies in host memory.
Result<DeviceCopy> copy_to_gpu(const Instance& from, Device device);

}  // namespace flashqla::cases
