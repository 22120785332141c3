// Rows of an output past the last sequence.
#pragma once

#include "cuda/device/memory.cuh"
#include "cuda/device/rows.cuh"

namespace flashqla::cuda {

// Zeros in rows used.. of a tensor [1,T,heads,columns], by block `block` of `blocks`, whose first
// `warps` take a row at a time each.
__device__ __forceinline__ void zero_tail(const Inputs& in, const TokenRef& to, std::int32_t heads,
                                          std::int32_t columns, std::int64_t block, std::int64_t blocks,
                                          std::int64_t warps = blockDim.x / 32) {
    if (!to) return;
    const std::int64_t used = clamped_used_tokens(in), rows = (in.problem.tokens - used) * heads;
    for (std::int64_t i = block * warps + threadIdx.x / 32; i < rows; i += blocks * warps) {
        const std::int64_t at = to.offset(0, used + i / heads, i % heads);
        for (int v = static_cast<int>(threadIdx.x) % 32; v < columns; v += 32) {
            store_element(to.data, to.dtype, at + v, 0.0f);
        }
    }
}

}  // namespace flashqla::cuda
