// Places in a ring of stages that warps fill and others empty; pipeline.cuh has the barriers.
#pragma once

#include <cstdint>

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

}  // namespace flashqla::cuda
