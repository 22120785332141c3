// Results that a warpgroup holds transposed, on their way to a tensor of tokens through a swizzled tile; sm_90.
#pragma once

#include <cstdint>

#include "base/call.hpp"
#include "cuda/device/swizzled_tile.cuh"
#include "cuda/device/token_tile.cuh"

namespace flashqla::cuda {

// x^T, 16 rows of a warp times 64 tokens, to rows of `to`: `tokens` of them, `columns` elements each, from element `at`
// on. Rows of the operands' type are turned in columns v.. of a tile that nobody else reads any more, and leave in
// stores of 16 bytes. NOTE: no calls, which would make products in flight wait.
template <class Op, class Tile>
__device__ __forceinline__ void store_turned(const TokenRef& to, std::int64_t at, int tokens, int columns, Tile& place,
                                             int v, const float (&x)[8][4]) {
    using Element = typename Op::Element;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const std::int64_t stride = only_here(to.token);
    Element* data = static_cast<Element*>(to.data) + at;
    if (to.dtype == kTypeOf<Element> && columns >= 16 && stride % 8 == 0 &&
        reinterpret_cast<std::uintptr_t>(data) % 16 == 0) [[likely]] {
        const int row = lane % 8 + lane / 16 * 8, eight = lane / 8 % 2 * 8;
        const std::uint32_t turned = shared_address(place.x) + place.offset(row, v + eight);
        __syncwarp();
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            const auto f = Fragment<Op>::of(x[2 * b], x[2 * b + 1]);
            stmatrix_transposed(turned + 16 * b * place.kRowBytes, f.x[0][0], f.x[0][1], f.x[0][2], f.x[0][3]);
        }
        __syncwarp();
        const int line = lane / 2, skip = lane % 2 * 8;
        data += line * stride + skip;
        const char* from = reinterpret_cast<const char*>(place.x) + place.offset(line, v + skip);
#pragma unroll
        for (int i = 0; i < 64; i += 16, data += 16 * stride) {
            const uint4 values = *reinterpret_cast<const uint4*>(from + i * place.kRowBytes);
            if (line + i < tokens) *reinterpret_cast<uint4*>(data) = values;
        }
        return;
    }
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

}  // namespace flashqla::cuda
