// In the place of src/cuda/device/pipeline.cuh.
#pragma once

#include <cstdint>

#include "block.hpp"
#include "cuda/device/mma.cuh"
#include "cuda/host/tensor_map.hpp"
#include "tensor_map.hpp"

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

inline bool is_elected() { return emulator::thread_index.x % 32 == 0; }

inline void fence_barrier_init() {}
inline void fence_for_wgmma() {}
inline void fence_for_copies() {}

inline void copy_bulk(void* to, const void* from, std::uint32_t bytes, Barrier& barrier) {
    if (shared_address(to) % 16 != 0 || reinterpret_cast<std::uintptr_t>(from) % 16 != 0 || bytes % 16 != 0)
        emulator::fail("a bulk copy that is not aligned");
    (void)shared_address(static_cast<char*>(to) + bytes - 1);
    emulator::later([=, at = &barrier] {
        std::memcpy(to, from, bytes);
        at->complete(bytes);
    });
}

inline void ask_for_map(const TensorMap&) {}
inline constexpr std::uint32_t kBoxBytes = 64 * 64 * 2;
inline void copy_box(void* to, const TensorMap& map, Barrier& barrier, int column, int head, int token, int batch) {
    if (shared_address(to) % 1024 != 0) emulator::fail("a box to an address that is no multiple of 1,024");
    emulator::later([=, at = &barrier] {
        EmulatedMap of;
        std::memcpy(&of, &map, sizeof(of));
        for (int row = 0; row < 64; ++row)
            for (int i = 0; i < 64; ++i) {
                char* element = static_cast<char*>(to) + place_in_panel(row, i);
                if (of.has(column + i, token + row)) {
                    std::memcpy(element, of.at(column + i, head, token + row, batch), 2);
                } else {
                    std::memset(element, 0, 2);
                }
            }
        at->complete(kBoxBytes);
    });
}

// Boxes that this thread of the block has stored, and that are still to be read.
inline int& unread_boxes() {
    static thread_local int unread[1024];
    return unread[emulator::thread_index.x];
}
inline void store_box(const TensorMap& map, const void* from, int column, int head, int token, int batch) {
    if (shared_address(from) % 1024 != 0) emulator::fail("a box from an address that is no multiple of 1,024");
    EmulatedMap of;
    std::memcpy(&of, &map, sizeof(of));
    int& unread = unread_boxes();
    ++unread;
    emulator::later([=, &unread] {
        for (int row = 0; row < 64; ++row)
            for (int i = 0; i < 64; ++i) {
                if (!of.has(column + i, token + row)) continue;
                std::memcpy(const_cast<char*>(of.at(column + i, head, token + row, batch)),
                            static_cast<const char*>(from) + place_in_panel(row, i), 2);
            }
        --unread;
        emulator::something_changed();
    });
}
inline void wait_until_boxes_are_read() {
    emulator::wait_until([&unread = unread_boxes()] { return unread == 0; });
}

template <int kNumber, int kThreads>
void sync_threads() {
    emulator::barrier(kNumber, kThreads);
}
inline void sync_128(int number) { emulator::barrier(static_cast<unsigned>(number), 128); }
inline void arrive_128(int number) { emulator::arrive(static_cast<unsigned>(number), 128); }
inline bool any_of_128(int number, bool is) {
    static thread_local bool any[16];
    const auto id = static_cast<unsigned>(number);
    emulator::barrier(id, 128);
    any[number] = false;
    emulator::barrier(id, 128);
    any[number] |= is;
    emulator::barrier(id, 128);
    return any[number];
}
template <int kRegisters>
void take_registers() {}
template <int kRegisters>
void give_registers() {}

}  // namespace flashqla::cuda
