// Accumulators and fragments whose columns are tokens, times factors of tokens in shared memory.
#pragma once

#include "cuda/device/operand.cuh"

namespace flashqla::cuda {

// The factors of tokens i and i + 1, i even.
__device__ __forceinline__ float2 pair_of(const float* factors, int i) {
    return *reinterpret_cast<const float2*>(factors + i);
}

// An accumulator whose columns are tokens first.. .
__device__ __forceinline__ void scale_columns(float (&x)[4], const float* factors, int first) {
    const float2 f = pair_of(factors, first + static_cast<int>(threadIdx.x % 4) * 2);
    x[0] *= f.x, x[1] *= f.y, x[2] *= f.x, x[3] *= f.y;
}

// An A fragment whose columns are tokens first.. .
template <class Op>
__device__ __forceinline__ Fragment<Op> scaled(const Fragment<Op>& from, const float* factors, int first) {
    Fragment<Op> to;
#pragma unroll
    for (int block = 0; block < 4; ++block) {
        const float2 f = pair_of(factors, first + block / 2 * 8 + static_cast<int>(threadIdx.x % 4) * 2);
        const float2 x = from.pair(block).value();
        to.set(block, Pair<Op>::of(f.x * x.x, f.y * x.y));
    }
    return to;
}

}  // namespace flashqla::cuda
