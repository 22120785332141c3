#include "cuda/host/device.hpp"

#include <cuda_runtime_api.h>

#include <charconv>

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

bool has_code_for(std::string_view list, int major, int minor) noexcept {
    while (!list.empty()) {
        const std::string_view item = list.substr(0, list.find(' '));
        list.remove_prefix(item.size() < list.size() ? item.size() + 1 : list.size());
        int number = 0;
        const auto [end, error] = std::from_chars(item.data(), item.data() + item.size(), number);
        if (error != std::errc{}) continue;
        const std::string_view kind(end, static_cast<std::size_t>(item.data() + item.size() - end));
        const int code_major = number / 10, code_minor = number % 10, wanted = 10 * major + minor;
        const bool exact = kind.substr(0, 1) == "a", real = kind.find("virtual") == kind.npos;
        const bool ptx = kind.find("real") == kind.npos && !exact;
        if (exact && number == wanted) return true;
        if (!exact && real && code_major == major && code_minor <= minor) return true;
        if (ptx && number <= wanted) return true;
    }
    return false;
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
