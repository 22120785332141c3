// Do two views share memory? Exact for everything that real tensors look like, and never a wrong "no".
#pragma once

#include <cstdint>

#include "flashqla/flashqla.hpp"

namespace flashqla {

// A view in bytes, relative to address 0. Dimensions of size 1 are dropped; only the first `rank` sizes are set.
struct Extent {
    std::int64_t base = 0;           // address of element 0
    std::int64_t low = 0, high = 0;  // first byte and one past the last byte touched; equal = nothing touched
    std::int64_t element = 0;        // bytes of an element
    std::int32_t rank = 0;
    std::int64_t size[kMaxRank];
    std::int64_t stride[kMaxRank];  // in bytes, may be negative or 0

    bool empty() const noexcept { return low == high; }
};

// False when the view leaves the 63-bit address space. The rank must be in 0..kMaxRank and no size negative.
bool make_extent(const TensorView& view, Extent& extent) noexcept;

// May two elements of one view share memory? (Sizes of a nested layout, such as any slice of a dense tensor, say no.)
bool overlaps_itself(const Extent& extent) noexcept;

bool overlap(const Extent& a, const Extent& b) noexcept;

// The same elements in the same order.
bool same_view(const Extent& a, const Extent& b) noexcept;

}  // namespace flashqla
