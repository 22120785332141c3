// Workspaces of calls.
#pragma once

#include <tvm/ffi/extra/c_env_api.h>

#ifdef FQLA_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "tensors.hpp"

namespace flashqla::python {

// torch's caching allocator by its C interface: memory on the current GPU, for the stream that is current there,
// without a tensor around it, which costs more than the memory. Null: it is not there. flash_qla/_native.py sets it
// when it loads the module.
struct TorchMemory {
    std::int32_t (*allocate)(std::uint64_t bytes, void** memory) = nullptr;
    std::int32_t (*release)(void* memory) = nullptr;
};
inline constinit TorchMemory torch_memory;

inline bool is_current(Device device) noexcept {
#ifdef FQLA_HAVE_CUDA
    int current = -1;
    return cudaGetDevice(&current) == cudaSuccess && current == device.index;
#else
    (void)device;
    return false;
#endif
}

// The workspace of one call on this thread.
//
// On the CPU it is a buffer that each thread keeps and that grows: asking the framework for a tensor would cost more
// than a decode step's whole overhead. What is larger than kMostKept goes back to the system after the call, because
// there the work takes milliseconds and the memory would be missed elsewhere.
//
// On a GPU it comes from the caller's framework (for torch: its caching allocator), which knows the stream that the
// memory may be reused on.
class Scratch {
public:
    Scratch(Device device, std::size_t bytes) {
        if (bytes == 0) return;
        workspace_.bytes = bytes;
        if (device.type == DeviceType::cpu) {
            workspace_.data = on_host(bytes);
        } else {
            workspace_.data = on_device(device, bytes);
        }
    }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() {
        if (of_torch_ != nullptr) torch_memory.release(of_torch_);
    }
    Workspace get() const noexcept { return workspace_; }

private:
    static constexpr std::size_t kAlignment = 64;
    static constexpr std::size_t kMostKept = std::size_t{64} << 20;

    struct Free {
        void operator()(void* memory) const noexcept { std::free(memory); }
    };
    using Memory = std::unique_ptr<void, Free>;

    static Memory allocate(std::size_t bytes) {
        Memory memory(std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment));
        if (!memory) {
            raise("MemoryError",
                  "flash_qla: the workspace of " + std::to_string(bytes) + " bytes could not be allocated");
        }
        return memory;
    }

    void* on_host(std::size_t bytes) {
        if (bytes > kMostKept) {
            own_ = allocate(bytes);
            return own_.get();
        }
        thread_local Memory kept;
        thread_local std::size_t size = 0;
        if (size < bytes) {
            size = 0;
            kept = allocate(std::max(bytes, size_t{1} << 16));
            size = std::max(bytes, size_t{1} << 16);
        }
        return kept.get();
    }

    void* on_device(Device device, std::size_t bytes) {
        if (torch_memory.allocate != nullptr && is_current(device)) {
            if (torch_memory.allocate(bytes, &of_torch_) == 0) return of_torch_;
            of_torch_ = nullptr;  // what follows says why in an exception
        }
        std::int64_t shape = static_cast<std::int64_t>(bytes), stride = 1;
        DLTensor prototype{};
        prototype.device = {static_cast<DLDeviceType>(device.type), device.index};
        prototype.dtype = {kDLUInt, 8, 1};
        prototype.ndim = 1;
        prototype.shape = &shape;
        prototype.strides = &stride;
        tensor_ = tvm::ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, tvm::ffi::ShapeView(&shape, 1), prototype.dtype,
                                                 prototype.device);
        return tensor_.data_ptr();
    }

    Workspace workspace_;
    Memory own_;
    void* of_torch_ = nullptr;
    tvm::ffi::Tensor tensor_;
};

// The stream that the caller's framework works on.
inline Stream current_stream(Device device) {
    if (device.type == DeviceType::cpu) return {};
    return {TVMFFIEnvGetStream(static_cast<std::int32_t>(device.type), device.index)};
}

}  // namespace flashqla::python
