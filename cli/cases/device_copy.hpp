// The tensors of a case in a GPU's own memory: for timing, where nothing may move over the bus, and for tests that need
// allocations of exactly the tensors' sizes.
#pragma once

#include <memory>
#include <vector>

#include "cases/instance.hpp"

namespace flashqla::cases {

struct DeviceCopy {
    Instance instance;  // its arguments lie on the GPU, its `tensors` are still those of the host
    std::vector<std::shared_ptr<std::byte>> memory;  // one allocation for each tensor's storage
    std::vector<std::size_t> bytes;                  // of each
};

// Makes copies of the case's tensors on its device. Of a long case only the first token rows are drawn, and repeated on
// the GPU: drawing every number would take a thousand times as long as the kernel that is timed.
class GpuTensors {
public:
    explicit GpuTensors(const Case& c);

    Result<DeviceCopy> copy() const;
    const Instance& instance() const noexcept { return host_; }  // its views have the case's shapes
    std::int64_t bytes() const;                                  // of one copy

private:
    Device device_;
    bool repeated_;  // the host has the first rows only
    Instance host_;
};

}  // namespace flashqla::cases
