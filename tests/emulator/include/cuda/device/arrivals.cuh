// In the place of src/cuda/device/arrivals.cuh. Blocks run one after the other, so that what a block waits for is there
// or comes from itself.
#pragma once

#include <cstdint>

#include "block.hpp"

namespace flashqla::cuda {

inline constexpr std::int32_t kUnknown = -2;

inline void announce(std::uint32_t* count, std::uint32_t more) {
    atomicAdd(count, more);
    emulator::something_changed();
}
inline void publish(std::int32_t* at, std::int32_t value) {
    *at = value;
    emulator::something_changed();
}
inline void wait_for_count(const std::uint32_t* count, std::uint32_t least) {
    emulator::wait_until([=] { return *count >= least; });
}
inline std::int32_t wait_for_value(const std::int32_t* at) {
    emulator::wait_until([=] { return *at != kUnknown; });
    return *at;
}

}  // namespace flashqla::cuda
