// Tiles in shared memory from a caller's tensor of any type.
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/call.hpp"
#include "cuda/device/shared_tile.cuh"

namespace flashqla::cuda {

// Rows of a tensor that may have another type than the operands, or be absent (zeros).
struct TokenRows {
    const void* data;
    DType dtype;
    std::int64_t stride;
    int rows, columns;

    // `tokens` rows of one head from (batch, token) on, from column `skip` on.
    static __device__ __forceinline__ TokenRows of(const TokenRef& x, std::int64_t batch, std::int64_t token,
                                                   std::int32_t head, int skip, int tokens, int columns) {
        if (!x) return {nullptr, DType::none, 0, 0, 0};
        const std::int64_t bytes = x.dtype == DType::f32 ? 4 : 2;
        return {static_cast<const char*>(x.data) + (x.offset(batch, token, head) + skip) * bytes, x.dtype, x.token,
                tokens, columns};
    }
};

template <class T>
inline constexpr DType kTypeOf = sizeof(T) == 4              ? DType::f32
                                 : std::is_same_v<T, __half> ? DType::f16
                                                             : DType::bf16;

// Fills a tile from elements of any type, rounded to the operands' one by one.
template <int kThreads, class Tile>
__device__ __noinline__ void fill_converted(Tile& tile, const TokenRows& from) {
    using Op = typename Tile::Op;
    constexpr int kPairs = Tile::kColumns / 2;
#pragma unroll 1
    for (int at = static_cast<int>(threadIdx.x) % kThreads; at < Tile::kRows * kPairs; at += kThreads) {
        const int row = at / kPairs, column = at % kPairs * 2;
        float x[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const bool inside = row < from.rows && column + j < from.columns;
            x[j] = inside ? load_element(from.data, from.dtype, row * from.stride + column + j) : 0.0f;
        }
        tile.set(row, column, Pair<Op>::of(x[0], x[1]));
    }
}

// As fill() for a tensor of the operands' own type; others are converted.
template <int kThreads, class Tile>
__device__ __forceinline__ bool fill_tokens(Tile& tile, const TokenRows& from) {
    using Input = typename Tile::Op::Input;
    constexpr int kVectors = Tile::kRows * Tile::kColumns / 8;
    constexpr int kFillers = kVectors < kThreads ? kVectors : kThreads;  // a small tile does not employ them all
    if (from.dtype != kTypeOf<Input>) {
        fill_converted<kThreads>(tile, from);
        return false;
    }
    if (kFillers < kThreads && threadIdx.x % kThreads >= kFillers) return true;
    return fill<kFillers>(
        tile, GlobalRows<Input>{static_cast<const Input*>(from.data), from.stride, from.rows, from.columns});
}

}  // namespace flashqla::cuda
