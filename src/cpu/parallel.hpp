// The one loop over tasks, and the state of the processor that they run in.
#pragma once

#include <algorithm>
#include <cstdint>

#include <omp.h>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace flashqla::cpu {

// Subnormal floats count as zero while this lives; the caller's mode comes back afterwards. States that decay and
// products of many decays end up among the subnormals, where Intel's cores are over ten times slower.
class FlushSubnormals {
public:
#if defined(__x86_64__) || defined(__i386__)
    FlushSubnormals() noexcept : mode_(_mm_getcsr()) { _mm_setcsr(mode_ | kFlushResults | kZeroOperands); }
    ~FlushSubnormals() { _mm_setcsr(mode_); }
#else
    FlushSubnormals() noexcept {}  // NOTE: not trivial, or compilers call the guard unused
#endif
    FlushSubnormals(const FlushSubnormals&) = delete;
    FlushSubnormals& operator=(const FlushSubnormals&) = delete;

private:
#if defined(__x86_64__) || defined(__i386__)
    static constexpr unsigned kFlushResults = 0x8000, kZeroOperands = 0x0040;
    unsigned mode_;
#endif
};

// Calls f(index, thread) for index in [0, count) on at most `threads` threads; thread < threads.
template <class F>
void parallel_for(std::int64_t count, std::int32_t threads, F&& f) noexcept {
    if (threads <= 1 || count <= 1) {
        const FlushSubnormals flush;
        for (std::int64_t i = 0; i < count; ++i) f(i, 0);
        return;
    }
    const int workers = static_cast<int>(std::min<std::int64_t>(threads, count));
#pragma omp parallel num_threads(workers)
    {
        const FlushSubnormals flush;
#pragma omp for schedule(dynamic, 1)
        for (std::int64_t i = 0; i < count; ++i) f(i, omp_get_thread_num());
    }
}

// Calls f(begin, end, thread) for contiguous ranges of equal size: for short tasks of equal cost that like to find
// their data where they left it.
template <class F>
void parallel_ranges(std::int64_t count, std::int32_t threads, F&& f) noexcept {
    const auto parts = static_cast<std::int32_t>(std::clamp<std::int64_t>(count, 1, std::max(threads, 1)));
    if (parts == 1) {
        const FlushSubnormals flush;
        return f(std::int64_t{0}, count, 0);
    }
#pragma omp parallel num_threads(parts)
    {
        const FlushSubnormals flush;
#pragma omp for schedule(static, 1)
        for (std::int32_t part = 0; part < parts; ++part)
            f(count * part / parts, count * (part + 1) / parts, omp_get_thread_num());
    }
}

}  // namespace flashqla::cpu
