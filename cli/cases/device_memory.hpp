// Memory of a GPU, memory that it shares with the host, and the time that work on it takes. A build without CUDA has
// the CPU only, and what only a GPU can do fails there with a sentence.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "flashqla/flashqla.hpp"

namespace flashqla::cases {

// "" when tensors can be placed on the device, else a sentence that says why not.
std::string device_problem(Device device);

// 64-byte aligned. On a GPU the pages move to whoever touches them, so the host may fill and compare tensors as usual,
// but only while no kernel runs. Throws std::bad_alloc.
std::shared_ptr<std::byte> allocate_shared(Device device, std::size_t bytes);

// Waits for everything that runs on the device and reports what went wrong there.
Status finish(Device device);

// Memory of the GPU's own, 256-byte aligned as its allocator gives it, with whatever lies there. Null: `status` says
// why.
std::shared_ptr<std::byte> allocate_on_gpu(Device device, std::size_t bytes, Status& status);

// Fills the GPU's memory with a block of the host's, again and again; the last time perhaps with a part of it. Returns
// when it is there.
Status repeat_on_gpu(std::byte* to, std::size_t bytes, const void* block, std::size_t block_bytes);

// Work that was recorded once, as a CUDA graph, and can be run again and again without the host's part in it.
class Recording {
public:
    // Records what `work` submits to the stream it is given; nothing runs yet.
    static Result<Recording> make(Device device, const std::function<Status(Stream)>& work);

    // Runs it `times` times and returns the seconds of one, measured by the GPU.
    Result<double> seconds(int times) const;

private:
    struct Parts;
    std::shared_ptr<Parts> parts_;
};

}  // namespace flashqla::cases
