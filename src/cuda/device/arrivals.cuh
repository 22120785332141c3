// How blocks of one kernel wait for what other blocks of it store: a count in global memory, zeroed before the kernel.
// Work that waits must be taken after the work that it waits for, from one counter and one after another by each
// block; then whatever is first among all that is not done never waits, however many blocks there are at a time.
#pragma once

#include <cstdint>

namespace flashqla::cuda {

// What is not known yet, in a word that is its own announcement.
inline constexpr std::int32_t kUnknown = -2;

// By one thread, behind a barrier of those that have stored: all of it can be seen by whoever sees the count.
__device__ __forceinline__ void announce(std::uint32_t* count, std::uint32_t more) {
    __threadfence();
    atomicAdd(count, more);
}

// A word that is all there is to be seen.
__device__ __forceinline__ void publish(std::int32_t* at, std::int32_t value) {
    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// Until the count is there. NOTE: a trap after a minute, so that an error in a kernel ends in a message instead of a
// GPU that hangs (under a sanitizer, what takes microseconds takes seconds); in one piece of assembly, as a barrier's
// wait is (pipeline.cuh).
__device__ __forceinline__ void wait_for_count(const std::uint32_t* count, std::uint32_t least) {
    asm volatile(
        "{\n.reg .pred done, late;\n.reg .u32 n, x;\nmov.u32 n, 0;\n"
        "POLL_%=:\nld.acquire.gpu.global.u32 x, [%0];\nsetp.ge.u32 done, x, %1;\n@done bra DONE_%=;\n"
        "nanosleep.u32 20;\nadd.u32 n, n, 1;\nsetp.gt.u32 late, n, 100000000;\n@late trap;\nbra "
        "POLL_%=;\nDONE_%=:\n}\n" ::"l"(count),
        "r"(least)
        : "memory");
}

// Such a word, once it is known.
__device__ __forceinline__ std::int32_t wait_for_value(const std::int32_t* at) {
    std::int32_t value;
    asm volatile(
        "{\n.reg .pred done, late;\n.reg .u32 n;\nmov.u32 n, 0;\n"
        "POLL_%=:\nld.relaxed.gpu.global.s32 %0, [%1];\nsetp.ne.s32 done, %0, %2;\n@done bra DONE_%=;\n"
        "nanosleep.u32 20;\nadd.u32 n, n, 1;\nsetp.gt.u32 late, n, 100000000;\n@late trap;\nbra POLL_%=;\nDONE_%=:\n}\n"
        : "=&r"(value)
        : "l"(at), "n"(kUnknown)
        : "memory");
    return value;
}

}  // namespace flashqla::cuda
