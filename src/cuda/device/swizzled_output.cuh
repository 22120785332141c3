// Results that a warpgroup holds transposed, on their way to a tensor of tokens through a swizzled tile; sm_90.
#pragma once

#include <cstdint>

#include "base/call.hpp"
#include "cuda/device/swizzled_tile.cuh"
#include "cuda/device/token_tile.cuh"

namespace flashqla::cuda {

// Whether rows of `to` can leave in stores of 16 bytes: rows of the operands' type, `columns` elements from `at` on.
template <class Op>
__device__ __forceinline__ bool stores_whole_vectors(const TokenRef& to, std::int64_t at, int columns) {
    using Element = typename Op::Element;
    return to.dtype == kTypeOf<Element> && columns >= 16 && to.token % 8 == 0 &&
           reinterpret_cast<std::uintptr_t>(static_cast<Element*>(to.data) + at) % 16 == 0;
}

// x^T, 16 rows of a warp, to columns v.. of a tile of 64 tokens.
template <class Op, class Tile>
__device__ __forceinline__ void turn(Tile& place, int lane, int v, const float (&x)[8][4]) {
    const int row = lane % 8 + lane / 16 * 8, eight = lane / 8 % 2 * 8;
    const std::uint32_t turned = shared_address(place.x) + place.offset(row, v + eight);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        const auto f = Fragment<Op>::of(x[2 * b], x[2 * b + 1]);
        stmatrix_transposed(turned + 16 * b * place.kRowBytes, f.x[0][0], f.x[0][1], f.x[0][2], f.x[0][3]);
    }
}

// The tile's columns v.. to rows of `to` from element `at` on, by a warpgroup: `tokens` of them, `columns` elements
// each, a multiple of 8, where rows are aligned for that.
template <class Op, class Tile>
__device__ __forceinline__ void store_lines(const TokenRef& to, std::int64_t at, int tokens, int columns,
                                            const Tile& place, int v) {
    using Element = typename Op::Element;
    const int thread = only_here(static_cast<int>(threadIdx.x)) & 127, skip = thread % 8 * 8;
    if (skip >= columns) return;
#pragma unroll 1
    for (int line = thread / 8; line < tokens; line += 16) {
        *reinterpret_cast<uint4*>(static_cast<Element*>(to.data) + at + line * to.token + skip) =
            *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(place.x) + place.offset(line, v + skip));
    }
}

// The same for whatever rows and types, `columns` of them, element by element.
__device__ __forceinline__ void store_turned_elements(const TokenRef& to, std::int64_t at, int tokens, int columns,
                                                      const float (&x)[8][4]) {
    const int lane = only_here(static_cast<int>(threadIdx.x)) & 31;
    const std::int64_t stride = only_here(to.token);
    with_type(to.dtype, to.data, [&]<class T>(T* elements) {
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int token = 8 * n + 2 * (lane % 4) + e % 2, skip = lane / 4 + e / 2 * 8;
                if (token < tokens && skip < columns) elements[at + token * stride + skip] = from_float<T>(x[n][e]);
            }
    });
}

// A warp's x^T to rows of `to`, 16 columns or fewer each. NOTE: no calls, which would make products in flight wait.
template <class Op, class Tile>
__device__ __forceinline__ void store_turned(const TokenRef& to, std::int64_t at, int tokens, int columns, Tile& place,
                                             int v, const float (&x)[8][4]) {
    if (!stores_whole_vectors<Op>(to, at, columns)) {
        store_turned_elements(to, at, tokens, columns, x);
        return;
    }
    using Element = typename Op::Element;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const std::int64_t stride = only_here(to.token);
    __syncwarp();
    turn<Op>(place, lane, v, x);
    __syncwarp();
    const int line = lane / 2, skip = lane % 2 * 8;
    Element* data = static_cast<Element*>(to.data) + at + line * stride + skip;
    const char* from = reinterpret_cast<const char*>(place.x) + place.offset(line, v + skip);
#pragma unroll
    for (int i = 0; i < 64; i += 16, data += 16 * stride) {
        const uint4 values = *reinterpret_cast<const uint4*>(from + i * place.kRowBytes);
        if (line + i < tokens) *reinterpret_cast<uint4*>(data) = values;
    }
}

}  // namespace flashqla::cuda
