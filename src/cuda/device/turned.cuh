// Results that a warp holds transposed, on their way to a tensor of tokens.
#pragma once

#include <cstdint>

#include "base/call.hpp"
#include "cuda/device/token_tile.cuh"

namespace flashqla::cuda {

// 16 rows (columns of the tensor) times 16 kBlocks tokens in a warp's accumulators.
template <int kBlocks>
using TurnedRows = float[2 * kBlocks][4];

// Element by element, for what store_turned cannot do otherwise.
template <int kBlocks>
__device__ __noinline__ void store_turned_by_element(const TokenRef& to, std::int64_t at, int tokens, int columns,
                                                     const TurnedRows<kBlocks>& x) {
    const int lane = static_cast<int>(threadIdx.x % 32), column = 2 * (lane % 4);
    with_type(to.dtype, to.data, [&]<class T>(T* data) {
#pragma unroll
        for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = 8 * n + column + e % 2, skip = lane / 4 + e / 2 * 8;
                if (row < tokens && skip < columns) data[at + row * to.token + skip] = from_float<T>(x[n][e]);
            }
    });
}

// x^T to rows of `to`: `tokens` of them, `columns` elements each, from element `at` on. 16-bit rows are turned in
// shared memory, in columns v.. of a tile that nobody else reads any more, and leave in stores of 16 bytes.
template <class Op, int kBlocks, int kRows, int kColumns>
__device__ __forceinline__ void store_turned(const TokenRef& to, std::int64_t at, int tokens, int columns,
                                             SharedTile<Op, kRows, kColumns>& place, int first, int v,
                                             const TurnedRows<kBlocks>& x) {
    if constexpr (Op::kParts == 1) {
        using Element = typename Op::Element;
        const int lane = static_cast<int>(threadIdx.x % 32), column = 2 * (lane % 4);
        const std::int64_t stride = only_here(to.token);
        Element* data = static_cast<Element*>(to.data) + at;
        if (to.dtype == kTypeOf<Element> && columns >= 16 && stride % 8 == 0 &&
            reinterpret_cast<std::uintptr_t>(data) % 16 == 0) {
            __syncwarp();
#pragma unroll
            for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    Pair<Op> pair = Pair<Op>::of(x[n][2 * half], x[n][2 * half + 1]);
                    pair.part[0] = transpose_8x8(pair.part[0]);
                    place.set(first + 8 * n + lane / 4, v + 8 * half + column, pair);
                }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < kBlocks; ++i) {
                const int row = 16 * i + lane / 2, skip = lane % 2 * 8;
                const uint4 eight = *reinterpret_cast<const uint4*>(place.x + (first + row) * place.kStride + v + skip);
                if (row < tokens) *reinterpret_cast<uint4*>(data + row * stride + skip) = eight;
            }
            return;
        }
    }
    TurnedRows<kBlocks> copy;  // whose address is taken; x stays in registers
#pragma unroll
    for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) copy[n][e] = x[n][e];
    store_turned_by_element<kBlocks>(to, at, tokens, columns, copy);
}

}  // namespace flashqla::cuda
