// A tensor in memory that the host can read, which knows which of its elements a call may write and notices every other
// change.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cases/device_memory.hpp"
#include "flashqla/flashqla.hpp"

namespace flashqla::cases {

// 64-byte aligned bytes with a snapshot. Several tensors may share one (slices of a packed tensor).
class Storage {
public:
    // Filled with poison, canary zones on both sides.
    Storage(DType dtype, std::int64_t elements, Device device = {});
    Storage(const Storage&) = delete;
    Storage& operator=(const Storage&) = delete;

    void* data() const noexcept { return data_; }  // first element behind the canary zone
    DType dtype() const noexcept { return dtype_; }
    std::int64_t bytes() const noexcept { return bytes_; }

    void allow(std::int64_t element) {
        if (writable_.empty()) writable_.resize(static_cast<std::size_t>(elements_));
        writable_[static_cast<std::size_t>(element)] = 1;
    }
    bool allowed(std::int64_t element) const {
        return !writable_.empty() && writable_[static_cast<std::size_t>(element)] != 0;
    }
    void take_snapshot();
    // -1, or the element (negative: in a canary zone) whose bytes changed although nobody may write them.
    bool first_change(std::int64_t& element) const;
    void restore();  // back to the snapshot

private:
    DType dtype_;
    std::int64_t elements_, bytes_;
    std::shared_ptr<std::byte> memory_;
    std::byte* base_;
    void* data_;
    std::vector<std::byte> snapshot_;
    std::vector<std::uint8_t> writable_;
};

struct HostTensor {
    std::string name;
    std::shared_ptr<Storage> storage;
    TensorView view;
    int head_axis = -1;     // outputs: axis of the heads
    bool by_token = false;  // outputs: [B,T,..]; otherwise the first axis is a state row or a head

    bool given() const noexcept { return storage != nullptr; }
    std::int64_t size() const noexcept;
    std::int64_t first_element() const noexcept;  // of view.data inside the storage
};

struct Memory {
    int gap_axis = -1;        // the stride of this axis is wider than its rows need
    std::int64_t gap = 0;     // by so many elements
    std::int64_t offset = 0;  // elements before the first one
};

HostTensor make_tensor(std::string name, DType dtype, const std::vector<std::int64_t>& shape, const Memory& memory = {},
                       Device device = {});

// f(index, offset): index has view.rank entries, offset counts elements from view.data.
template <class F>
void for_each(const TensorView& view, F&& f) {
    std::int64_t index[kMaxRank] = {};
    for (int axis = 0; axis < view.rank; ++axis) {
        if (view.shape[static_cast<std::size_t>(axis)] == 0) return;
    }
    for (;;) {
        std::int64_t offset = 0;
        for (int axis = 0; axis + 1 < view.rank; ++axis) {
            offset += index[axis] * view.stride[static_cast<std::size_t>(axis)];
        }
        const auto last = static_cast<std::size_t>(view.rank - 1);
        for (index[last] = 0; index[last] < view.shape[last]; ++index[last]) {
            f(static_cast<const std::int64_t*>(index), offset + index[last] * view.stride[last]);
        }
        int axis = view.rank - 2;
        for (; axis >= 0 && ++index[axis] == view.shape[static_cast<std::size_t>(axis)]; --axis) index[axis] = 0;
        if (axis < 0) return;
    }
}

}  // namespace flashqla::cases
