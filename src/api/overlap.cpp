#include "api/overlap.hpp"

#include <algorithm>

namespace flashqla {
namespace {

// The bytes that the dimensions of stride not divisible by `pitch` cover, modulo pitch: [begin, begin + length).
struct Residues {
    std::int64_t begin, length;
};

Residues residues(const Extent& e, std::int64_t pitch) noexcept {
    std::int64_t low = 0, high = e.element;
    for (std::int32_t i = 0; i < e.rank; ++i) {
        if (e.stride[i] % pitch == 0) continue;
        const std::int64_t reach = (e.size[i] - 1) * e.stride[i];
        (reach < 0 ? low : high) += reach;
    }
    const std::int64_t begin = ((e.base + low) % pitch + pitch) % pitch;
    return {begin, high - low};
}

// All bytes of a and b, modulo pitch, lie in two arcs of a circle. Arcs that do not meet prove that a and b do not.
bool apart_modulo(const Extent& a, const Extent& b, std::int64_t pitch) noexcept {
    const Residues ra = residues(a, pitch), rb = residues(b, pitch);
    if (ra.length > pitch || rb.length > pitch) return false;
    const std::int64_t from_a_to_b = (rb.begin - ra.begin + pitch) % pitch;
    const std::int64_t from_b_to_a = (ra.begin - rb.begin + pitch) % pitch;
    return from_a_to_b >= ra.length && from_b_to_a >= rb.length;
}

}  // namespace

bool make_extent(const TensorView& view, Extent& extent) noexcept {
    extent.rank = 0;
    extent.element = static_cast<std::int64_t>(size_of(view.dtype));
    if (__builtin_add_overflow(reinterpret_cast<std::uintptr_t>(view.data), 0, &extent.base)) return false;
    extent.low = extent.high = extent.base;
    for (std::int32_t i = 0; i < view.rank; ++i) {
        if (view.shape[i] == 0) return true;
    }
    if (__builtin_add_overflow(extent.high, extent.element, &extent.high)) return false;
    for (std::int32_t i = 0; i < view.rank; ++i) {
        if (view.shape[i] == 1) continue;
        std::int64_t bytes = 0, reach = 0;
        if (__builtin_mul_overflow(view.stride[i], extent.element, &bytes)) return false;
        if (__builtin_mul_overflow(view.shape[i] - 1, bytes, &reach)) return false;
        std::int64_t& end = reach < 0 ? extent.low : extent.high;
        if (__builtin_add_overflow(end, reach, &end)) return false;
        extent.size[extent.rank] = view.shape[i];
        extent.stride[extent.rank] = bytes;
        ++extent.rank;
    }
    return extent.low >= 0;
}

bool overlaps_itself(const Extent& e) noexcept {
    if (e.empty()) return false;
    // From the innermost dimension outwards, each stride must step over everything inside it.
    const auto step = [&](std::int32_t i) { return e.stride[i] < 0 ? -e.stride[i] : e.stride[i]; };
    std::int32_t order[kMaxRank] = {};
    for (std::int32_t i = 0; i < e.rank; ++i) {
        std::int32_t at = i;
        for (; at > 0 && step(order[at - 1]) > step(i); --at) order[at] = order[at - 1];
        order[at] = i;
    }
    std::int64_t inside = e.element;
    for (std::int32_t i = 0; i < e.rank; ++i) {
        if (step(order[i]) < inside) return true;
        inside += (e.size[order[i]] - 1) * step(order[i]);
    }
    return false;
}

bool overlap(const Extent& a, const Extent& b) noexcept {
    if (a.empty() || b.empty() || a.high <= b.low || b.high <= a.low) return false;
    // Slices of one packed tensor interleave: some stride of theirs is the pitch of its rows.
    for (const Extent* e : {&a, &b}) {
        for (std::int32_t i = 0; i < e->rank; ++i) {
            const std::int64_t pitch = e->stride[i] < 0 ? -e->stride[i] : e->stride[i];
            if (pitch > 0 && apart_modulo(a, b, pitch)) return false;
        }
    }
    return true;
}

bool same_view(const Extent& a, const Extent& b) noexcept {
    return a.base == b.base && a.element == b.element && a.rank == b.rank &&
           std::equal(a.size, a.size + a.rank, b.size) && std::equal(a.stride, a.stride + a.rank, b.stride);
}

}  // namespace flashqla
