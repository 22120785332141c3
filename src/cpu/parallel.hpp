// The one loop over tasks.
#pragma once

#include <algorithm>
#include <cstdint>

#include <omp.h>

namespace flashqla::cpu {

// Calls f(index, thread) for index in [0, count) on at most `threads` threads; thread < threads.
template <class F>
void parallel_for(std::int64_t count, std::int32_t threads, F&& f) noexcept {
    if (threads <= 1 || count <= 1) {
        for (std::int64_t i = 0; i < count; ++i) f(i, 0);
        return;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast <int>(std::min <std::int64_t>(threads, count)))
    for (std::int64_t i = 0; i < count; ++i) f(i, omp_get_thread_num());
}

// Calls f(begin, end, thread) for contiguous ranges of equal size: for short tasks of equal cost that like to find
// their data where they left it.
template <class F>
void parallel_ranges(std::int64_t count, std::int32_t threads, F&& f) noexcept {
    const auto parts = static_cast<std::int32_t>(std::clamp<std::int64_t>(count, 1, std::max(threads, 1)));
    if (parts == 1) return f(std::int64_t{0}, count, 0);
#pragma omp parallel for schedule(static, 1) num_threads(parts)
    for (std::int32_t part = 0; part < parts; ++part)
        f(count * part / parts, count * (part + 1) / parts, omp_get_thread_num());
}

}  // namespace flashqla::cpu
