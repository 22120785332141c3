// In the place of src/cuda/device/pipeline.cuh.
#pragma once

#include <cstdint>

#include "block.hpp"
#include "cuda/device/mma.cuh"

namespace flashqla::cuda {

struct alignas(8) Barrier {
    std::uint8_t count, left;
    std::uint16_t phase;
    std::int32_t bytes;

    void init(std::uint32_t arrivals) { count = left = static_cast<std::uint8_t>(arrivals), phase = 0, bytes = 0; }
    void check() {
        if (left == 0 && bytes == 0) left = count, phase ^= 1;
        emulator::something_changed();
    }
    void arrive() {
        if (left == 0) emulator::fail("more arrivals at a barrier than it was made for");
        --left;
        check();
    }
    void arrive_expecting(std::uint32_t more) {
        bytes += static_cast<std::int32_t>(more);
        arrive();
    }
    void arrive_after_copies() {
        emulator::after_copies([this] { arrive(); });
    }
    void complete(std::uint32_t come) {
        bytes -= static_cast<std::int32_t>(come);
        check();
    }
    void wait(std::uint32_t parity) {
        emulator::wait_until([this, parity] { return phase != parity; });
    }
};

inline void fence_barrier_init() {}
inline void fence_for_wgmma() {}

inline void copy_bulk(void* to, const void* from, std::uint32_t bytes, Barrier& barrier) {
    if (shared_address(to) % 16 != 0 || reinterpret_cast<std::uintptr_t>(from) % 16 != 0 || bytes % 16 != 0)
        emulator::fail("a bulk copy that is not aligned");
    (void)shared_address(static_cast<char*>(to) + bytes - 1);
    emulator::later([=, at = &barrier] {
        std::memcpy(to, from, bytes);
        at->complete(bytes);
    });
}

template <int kNumber, int kThreads>
void sync_threads() {
    emulator::barrier(kNumber, kThreads);
}
template <int kRegisters>
void take_registers() {}
template <int kRegisters>
void give_registers() {}

}  // namespace flashqla::cuda
