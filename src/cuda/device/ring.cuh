// A ring of stages that warps fill and others empty; pipeline.cuh has the barriers.
#pragma once

#include <cstdint>

#include "cuda/device/pipeline.cuh"

namespace flashqla::cuda {

// The place in a ring of stages and the parity of its round.
template <int kStages>
struct RingPlace {
    int stage = 0;
    std::uint32_t round = 0;

    __device__ __forceinline__ void next() {
        if (++stage == kStages) stage = 0, round ^= 1;
    }
};

// The same in one register, for a power of two of stages: how many have been passed.
template <int kStages>
struct Turn {
    static_assert((kStages & (kStages - 1)) == 0);
    std::uint32_t n = 0;

    __device__ __forceinline__ std::uint32_t stage() const { return n % kStages; }
    __device__ __forceinline__ std::uint32_t round() const { return n / kStages % 2; }
};

// Tells those who compute that what this thread loads is there, or will be: `copied` if all of it comes in the
// background. NOTE: what a thread has stored itself is not what arrive_after_copies() answers for.
__device__ __forceinline__ void hand_over(Barrier& full, bool copied) {
    if (copied) {
        full.arrive_after_copies();
    } else {
        copies_commit();
        copies_wait<0>();
        full.arrive();
    }
}

}  // namespace flashqla::cuda
