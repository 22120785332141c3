#include "cuda/host/device.hpp"

#include <cuda_runtime_api.h>

#include <charconv>

#include "cuda/reserved.hpp"

#ifndef FQLA_CUDA_ARCHITECTURES
#define FQLA_CUDA_ARCHITECTURES ""
#endif

namespace flashqla::cuda {
namespace {

int attribute(cudaDeviceAttr name, int device) noexcept {
    int value = 0;
    return cudaDeviceGetAttribute(&value, name, device) == cudaSuccess ? value : 0;
}

Gpus find_gpus() {
    Gpus found;
    int count = 0;
    if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
        // NOTE: the runtime keeps the error for the next cudaGetLastError(), which is the caller's.
        (void)cudaGetLastError();
        found.problem = std::string("no GPU can be used: ") + cudaGetErrorString(error);
        return found;
    }
    for (int device = 0; device < count; ++device) {
        GpuInfo info;
        cudaDeviceProp properties;
        if (cudaGetDeviceProperties(&properties, device) == cudaSuccess) info.name = properties.name;
        info.major = attribute(cudaDevAttrComputeCapabilityMajor, device);
        info.minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
        info.multiprocessors = attribute(cudaDevAttrMultiProcessorCount, device);
        info.shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
        info.hopper = info.major == 9 && has_exact_code_for(architectures(), info.major, info.minor) &&
                      attribute(cudaDevAttrReservedSharedMemoryPerBlock, device) == kReservedSharedBytes;
        info.grids_wait = has_code_from_hopper_on(architectures(), info.major, info.minor);
        found.list.push_back(info);
    }
    if (found.list.empty()) found.problem = "no GPU can be used: the driver lists none";
    return found;
}

}  // namespace

const Gpus& gpus() {
    static const Gpus found = find_gpus();
    return found;
}

std::string_view architectures() noexcept { return FQLA_CUDA_ARCHITECTURES; }

namespace {

// f(compute capability as a number such as 90, what follows it) for each item, until it is true for one.
template <class F>
bool any_of_items(std::string_view list, F&& f) noexcept {
    while (!list.empty()) {
        const std::string_view item = list.substr(0, list.find(' '));
        list.remove_prefix(item.size() < list.size() ? item.size() + 1 : list.size());
        int number = 0;
        const auto [end, error] = std::from_chars(item.data(), item.data() + item.size(), number);
        if (error != std::errc{}) continue;
        if (f(number, std::string_view(end, static_cast<std::size_t>(item.data() + item.size() - end)))) return true;
    }
    return false;
}

bool is_exact(std::string_view kind) noexcept { return kind.substr(0, 1) == "a"; }

// Whether the code of an item runs there.
bool runs_on(int number, std::string_view kind, int major, int minor) noexcept {
    const int code_major = number / 10, code_minor = number % 10, wanted = 10 * major + minor;
    const bool real = kind.find("virtual") == kind.npos, ptx = kind.find("real") == kind.npos;
    if (is_exact(kind)) return number == wanted;
    return (real && code_major == major && code_minor <= minor) || (ptx && number <= wanted);
}

}  // namespace

bool has_code_for(std::string_view list, int major, int minor) noexcept {
    return any_of_items(list, [=](int number, std::string_view kind) { return runs_on(number, kind, major, minor); });
}

// NOTE: machine code goes before PTX and later PTX before earlier, so that nothing older runs where this is true.
bool has_code_from_hopper_on(std::string_view list, int major, int minor) noexcept {
    return any_of_items(
        list, [=](int number, std::string_view kind) { return number >= 90 && runs_on(number, kind, major, minor); });
}

bool has_exact_code_for(std::string_view list, int major, int minor) noexcept {
    return any_of_items(
        list, [=](int number, std::string_view kind) { return is_exact(kind) && number == 10 * major + minor; });
}

CurrentDevice::CurrentDevice(int index) noexcept {
    int current = -1;
    error_ = cudaGetDevice(&current);
    if (error_ != cudaSuccess || current == index) return;
    error_ = cudaSetDevice(index);
    if (error_ == cudaSuccess) before_ = current;
}

CurrentDevice::~CurrentDevice() {
    if (before_ >= 0) (void)cudaSetDevice(before_);
}

}  // namespace flashqla::cuda
