// In the place of src/cuda/device/mma.cuh: what the instructions do, by the PTX manual's tables of which lane holds
// what.
#pragma once

#include <cstdint>
#include <cstring>

#include "block.hpp"

namespace flashqla::cuda {
namespace emulated {

template <class T>
float half_of(std::uint32_t pair, int i) {
    const auto bits = static_cast<std::uint16_t>(pair >> (16 * i));
    T x;
    std::memcpy(&x, &bits, sizeof(x));
    return static_cast<float>(x);
}

inline std::uint32_t pair_of(std::uint16_t low, std::uint16_t high) { return low | std::uint32_t(high) << 16; }

template <bool kTransposed>
void ldmatrix(std::uint32_t (&x)[4], std::uint32_t address) {
    if (address % 16 != 0) emulator::fail("ldmatrix of an address that is no multiple of 16");
    emulator::Lane& lane = emulator::my_lane();
    lane.in[0] = address;
    emulator::meet([](emulator::Lane* lanes) {
        for (int block = 0; block < 4; ++block) {
            std::uint16_t m[8][8];
            for (int r = 0; r < 8; ++r) std::memcpy(m[r], emulator::shared_memory + lanes[8 * block + r].in[0], 16);
            for (int i = 0; i < 32; ++i) {
                const int a = i / 4, b = 2 * (i % 4);
                lanes[i].out[block] = kTransposed ? pair_of(m[b][a], m[b + 1][a]) : pair_of(m[a][b], m[a][b + 1]);
            }
        }
    });
    std::memcpy(x, lane.out, sizeof(x));
}

// A lane's registers go in as a, b0, b1, c; `multiply` makes the new c of all lanes.
template <class F>
void mma(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1, F&& multiply) {
    emulator::Lane& lane = emulator::my_lane();
    std::memcpy(lane.in, a, sizeof(a));
    lane.in[4] = b0;
    lane.in[5] = b1;
    std::memcpy(lane.in + 6, c, sizeof(c));
    emulator::meet(multiply);
    std::memcpy(c, lane.out, sizeof(c));
}

}  // namespace emulated

template <class T>
void mma_16x8x16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1, T) {
    emulated::mma(c, a, b0, b1, [](emulator::Lane* lanes) {
        float A[16][16], B[16][8];
        for (int i = 0; i < 32; ++i) {
            const int r = i / 4, p = 2 * (i % 4);
            for (int e = 0; e < 2; ++e) {
                for (int block = 0; block < 4; ++block) {
                    A[r + block % 2 * 8][p + block / 2 * 8 + e] = emulated::half_of<T>(lanes[i].in[block], e);
                }
                B[p + e][r] = emulated::half_of<T>(lanes[i].in[4], e);
                B[p + 8 + e][r] = emulated::half_of<T>(lanes[i].in[5], e);
            }
        }
        for (int i = 0; i < 32; ++i) {
            float sums[4];
            std::memcpy(sums, lanes[i].in + 6, sizeof(sums));
            for (int e = 0; e < 4; ++e) {
                for (int k = 0; k < 16; ++k) sums[e] += A[i / 4 + e / 2 * 8][k] * B[k][2 * (i % 4) + e % 2];
            }
            std::memcpy(lanes[i].out, sums, sizeof(sums));
        }
    });
}

inline constexpr std::uint32_t kTf32Mask = 0xffffe000u;
inline void mma_16x8x8(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    emulated::mma(c, a, b0, b1, [](emulator::Lane* lanes) {
        const auto number = [&](int i, int which) { return __uint_as_float(lanes[i].in[which] & kTf32Mask); };
        for (int i = 0; i < 32; ++i) {
            float sums[4];
            std::memcpy(sums, lanes[i].in + 6, sizeof(sums));
            for (int e = 0; e < 4; ++e) {
                const int row = i / 4, column = 2 * (i % 4) + e % 2;
                for (int k = 0; k < 8; ++k) {
                    sums[e] += number(4 * row + k % 4, e / 2 + k / 4 * 2) * number(4 * column + k % 4, 4 + k / 4);
                }
            }
            std::memcpy(lanes[i].out, sums, sizeof(sums));
        }
    });
}

inline std::uint32_t shared_address(const void* p) {
    const auto offset = static_cast<const std::byte*>(p) - emulator::shared_memory;
    if (offset < 0 || offset >= static_cast<std::ptrdiff_t>(emulator::kSharedBytes)) {
        emulator::fail("an address outside of shared memory");
    }
    return static_cast<std::uint32_t>(offset);
}

inline void ldmatrix(std::uint32_t (&x)[4], std::uint32_t address) { emulated::ldmatrix<false>(x, address); }
inline void ldmatrix_transposed(std::uint32_t (&x)[4], std::uint32_t address) { emulated::ldmatrix<true>(x, address); }

inline std::uint32_t transpose_8x8(std::uint32_t x) {
    emulator::Lane& lane = emulator::my_lane();
    lane.in[0] = x;
    emulator::meet([](emulator::Lane* lanes) {
        std::uint16_t m[8][8];
        for (int i = 0; i < 32; ++i) std::memcpy(&m[i / 4][2 * (i % 4)], lanes[i].in, 4);
        for (int i = 0; i < 32; ++i)
            lanes[i].out[0] = emulated::pair_of(m[2 * (i % 4)][i / 4], m[2 * (i % 4) + 1][i / 4]);
    });
    return lane.out[0];
}

inline void copy_16_async(std::uint32_t to, const void* from, bool inside) {
    emulator::copy_16_async(to, from, inside);
}
inline void copies_commit() { emulator::copies_commit(); }
template <int kLeft>
void copies_wait() {
    emulator::copies_wait(kLeft);
}

}  // namespace flashqla::cuda
