#include "cases/host_tensor.hpp"

#include <algorithm>
#include <cstring>

namespace flashqla::cases {
namespace {

constexpr std::int64_t kCanaryBytes = 256;

// A quiet NaN with a recognisable payload in the float types; a large positive number in the integer types.
void fill_with_poison(std::byte* data, std::int64_t bytes, DType dtype) {
    unsigned char pattern[2] = {0x5a, 0x5a};
    std::int64_t step = 2;
    std::uint32_t f32 = 0x7fc5a5a5u;
    std::uint16_t half = dtype == DType::bf16 ? 0x7fc5u : 0x7e5au;
    const void* source = pattern;
    if (dtype == DType::f32) {
        source = &f32;
        step = 4;
    } else if (dtype == DType::bf16 || dtype == DType::f16) {
        source = &half;
    }
    for (std::int64_t i = 0; i < bytes; i += step) {
        std::memcpy(data + i, source, static_cast<std::size_t>(std::min(step, bytes - i)));
    }
}

}  // namespace

Storage::Storage(DType dtype, std::int64_t elements, Device device)
    : dtype_(dtype), elements_(elements), bytes_(elements * static_cast<std::int64_t>(size_of(dtype))) {
    const std::int64_t total = bytes_ + 2 * kCanaryBytes;
    memory_ = allocate_shared(device, static_cast<std::size_t>(total));
    base_ = memory_.get();
    fill_with_poison(base_, total, dtype);
    data_ = base_ + kCanaryBytes;
}

void Storage::take_snapshot() { snapshot_.assign(base_, base_ + bytes_ + 2 * kCanaryBytes); }

void Storage::restore() { std::copy(snapshot_.begin(), snapshot_.end(), base_); }

bool Storage::first_change(std::int64_t& element) const {
    const std::int64_t total = bytes_ + 2 * kCanaryBytes;
    const auto width = static_cast<std::int64_t>(size_of(dtype_));
    if (writable_.empty() && std::memcmp(base_, snapshot_.data(), static_cast<std::size_t>(total)) == 0) return false;
    for (std::int64_t i = 0; i < total; ++i) {
        if (base_[i] == snapshot_[static_cast<std::size_t>(i)]) continue;
        const std::int64_t byte = i - kCanaryBytes;
        const bool inside = byte >= 0 && byte < bytes_;
        if (inside && allowed(byte / width)) continue;
        element = byte >= 0 ? byte / width : -((-byte + width - 1) / width);
        return true;
    }
    return false;
}

std::int64_t HostTensor::size() const noexcept {
    std::int64_t n = 1;
    for (int axis = 0; axis < view.rank; ++axis) n *= view.shape[static_cast<std::size_t>(axis)];
    return n;
}

std::int64_t HostTensor::first_element() const noexcept {
    return (static_cast<const std::byte*>(view.data) - static_cast<const std::byte*>(storage->data())) /
           static_cast<std::int64_t>(size_of(view.dtype));
}

HostTensor make_tensor(std::string name, DType dtype, const std::vector<std::int64_t>& shape, const Memory& memory,
                       Device device) {
    HostTensor tensor;
    tensor.name = std::move(name);
    tensor.view.dtype = dtype;
    tensor.view.device = device;
    tensor.view.rank = static_cast<std::int32_t>(shape.size());
    std::int64_t stride = 1;
    for (int axis = tensor.view.rank - 1; axis >= 0; --axis) {
        const auto i = static_cast<std::size_t>(axis);
        tensor.view.shape[i] = shape[i];
        if (axis == memory.gap_axis) stride += memory.gap;
        tensor.view.stride[i] = stride;
        stride *= shape[i];
    }
    tensor.storage = std::make_shared<Storage>(dtype, stride + memory.offset, device);
    tensor.view.data =
        static_cast<std::byte*>(tensor.storage->data()) + memory.offset * static_cast<std::int64_t>(size_of(dtype));
    return tensor;
}

}  // namespace flashqla::cases
