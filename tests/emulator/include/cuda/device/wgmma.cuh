// In the place of src/cuda/device/wgmma.cuh.
#pragma once

#include <cstdint>
#include <cstring>

#include "block.hpp"
#include "cuda/device/mma.cuh"
#include "cuda/device/shared_operand.cuh"

namespace flashqla::cuda {

inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::products_commit(); }
template <int kLeft>
void wgmma_wait() {
    emulator::products_wait(kLeft);
}

template <int kTiles>
void settle(float (&)[kTiles][4]) {}
inline void settle(std::uint32_t (&)[4]) {}

inline std::uint32_t uniform(std::uint32_t x) {
    const std::uint32_t first = __shfl_sync(0xffffffffu, x, 0);
    if (first != x) emulator::fail("a number that is not uniform");
    return first;
}

namespace emulated {
template <class T>
float element(SharedOperand o, Rows rows, int mn, int k) {
    const std::uint32_t address = (o.low & 0x3fff) << 4, leading = (o.low >> 16 & 0x3fff) << 4,
                        stride = (o.high & 0x3fff) << 4;
    std::uint32_t at;
    if (o.high >> 30 == 1) {
        at = rows == Rows::along_k ? address + mn / 8 * stride + mn % 8 * 128 + k * 2
                                   : address + mn / 64 * leading + k / 8 * stride + k % 8 * 128 + mn % 64 * 2;
        at ^= (at >> 7 & 7) << 4;
    } else {
        at = address + mn / 8 * stride + k / 8 * leading +
             (rows == Rows::along_k ? mn % 8 * 16 + k % 8 * 2 : k % 8 * 16 + mn % 8 * 2);
    }
    if (at + 2 > emulator::kSharedBytes) emulator::fail("an operand outside of shared memory");
    std::uint16_t bits;
    std::memcpy(&bits, emulator::shared_memory + at, 2);
    T x;
    std::memcpy(&x, &bits, 2);
    return static_cast<float>(x);
}
}  // namespace emulated

template <Rows kRowsA, Rows kRows, int kN, class T>
void wgmma(float (&d)[kN][4], SharedOperand a, SharedOperand b, bool add, T) {
    float(*to)[4] = d;
    const int lane = static_cast<int>(emulator::lane_index()), warp = static_cast<int>(threadIdx.x / 32 % 4);
    emulator::product([=] {
        float left[2][16];
        for (int h = 0; h < 2; ++h)
            for (int k = 0; k < 16; ++k) left[h][k] = emulated::element<T>(a, kRowsA, 16 * warp + lane / 4 + 8 * h, k);
        for (int n = 0; n < kN; ++n)
            for (int e = 0; e < 2; ++e) {
                float right[16];
                for (int k = 0; k < 16; ++k) right[k] = emulated::element<T>(b, kRows, 8 * n + 2 * (lane % 4) + e, k);
                for (int h = 0; h < 2; ++h) {
                    float sum = add ? to[n][2 * h + e] : 0.0f;
                    for (int k = 0; k < 16; ++k) sum += left[h][k] * right[k];
                    to[n][2 * h + e] = sum;
                }
            }
    });
}

template <bool kAdd, Rows kRowsA, Rows kRows, int kN, class T>
void wgmma(float (&d)[kN][4], SharedOperand a, SharedOperand b, T type) {
    wgmma<kRowsA, kRows>(d, a, b, kAdd, type);
}

// A in registers: taken when the product is asked for.
template <bool kAdd, Rows kRows, int kN, class T>
void wgmma(float (&d)[kN][4], const std::uint32_t (&a)[4], SharedOperand b, T) {
    float(*to)[4] = d;
    emulator::Lane& mine = emulator::my_lane();
    std::memcpy(mine.in, a, sizeof(a));
    emulator::meet([](emulator::Lane* lanes) {
        for (int i = 0; i < 32; ++i)
            for (int j = 0; j < 4; ++j) std::memcpy(lanes[i].out + 4 * j, lanes[i / 4 * 4 + j].in, 16);
    });
    struct Rows16 {
        float x[2][16];
    } left;
    for (int j = 0; j < 4; ++j)
        for (int block = 0; block < 4; ++block)
            for (int e = 0; e < 2; ++e)
                left.x[block % 2][block / 2 * 8 + 2 * j + e] = emulated::half_of<T>(mine.out[4 * j + block], e);
    const int lane = static_cast<int>(emulator::lane_index());
    emulator::product([=] {
        for (int n = 0; n < kN; ++n)
            for (int e = 0; e < 2; ++e) {
                float right[16];
                for (int k = 0; k < 16; ++k) right[k] = emulated::element<T>(b, kRows, 8 * n + 2 * (lane % 4) + e, k);
                for (int h = 0; h < 2; ++h) {
                    float sum = kAdd ? to[n][2 * h + e] : 0.0f;
                    for (int k = 0; k < 16; ++k) sum += left.x[h][k] * right[k];
                    to[n][2 * h + e] = sum;
                }
            }
    });
}

namespace emulated {
template <bool kTransposed>
void stmatrix(std::uint32_t address, const std::uint32_t (&x)[4]) {
    if (address % 16 != 0) emulator::fail("stmatrix to an address that is no multiple of 16");
    emulator::Lane& lane = emulator::my_lane();
    lane.in[0] = address;
    std::memcpy(lane.in + 1, x, sizeof(x));
    emulator::meet([](emulator::Lane* lanes) {
        for (int block = 0; block < 4; ++block)
            for (int i = 0; i < 32; ++i)
                for (int e = 0; e < 2; ++e) {
                    const auto bits = static_cast<std::uint16_t>(lanes[i].in[1 + block] >> (16 * e));
                    const int pair = 2 * (i % 4) + e, row = kTransposed ? pair : i / 4,
                              column = kTransposed ? i / 4 : pair;
                    std::memcpy(emulator::shared_memory + lanes[8 * block + row].in[0] + column * 2, &bits, 2);
                }
    });
}
}  // namespace emulated

inline void stmatrix(std::uint32_t address, std::uint32_t x0, std::uint32_t x1, std::uint32_t x2, std::uint32_t x3) {
    emulated::stmatrix<false>(address, {x0, x1, x2, x3});
}
inline void stmatrix_transposed(std::uint32_t address, std::uint32_t x0, std::uint32_t x1, std::uint32_t x2,
                                std::uint32_t x3) {
    emulated::stmatrix<true>(address, {x0, x1, x2, x3});
}

}  // namespace flashqla::cuda
