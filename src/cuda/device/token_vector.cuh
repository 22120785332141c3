// A number for each of a chunk's 64 tokens, in the order in which the lanes of a matrix product need them.
#pragma once

#include "cuda/device/memory.cuh"

namespace flashqla::cuda {

// A lane's columns of an accumulator of 16 tokens are 2 q, 2 q + 1, 2 q + 8, 2 q + 9, q = lane % 4: they lie side by
// side, and the four lanes' in different banks.
struct TokenVector {
    static constexpr int kLane = 20;

    alignas(16) float x[4 * kLane];

    static __device__ __forceinline__ int place(int token) { return token % 8 / 2 * kLane + token / 8 * 2 + token % 2; }
    __device__ __forceinline__ float at(int place) const { return x[place]; }
    // Where this lane's columns begin. NOTE: known only where it is asked for, or it is kept in a register all along.
    static __device__ __forceinline__ int own() { return (only_here(static_cast<int>(threadIdx.x)) & 3) * kLane; }
    // The lane's columns of tokens 16 block .. 16 block + 15.
    __device__ __forceinline__ float4 of_block(int block, int own) const {
        return *reinterpret_cast<const float4*>(x + own + 4 * block);
    }
    // Tokens 2 pair and the next.
    __device__ __forceinline__ void set_pair(int pair, float first, float second) {
        *reinterpret_cast<float2*>(x + place(2 * pair)) = make_float2(first, second);
    }
    __device__ __forceinline__ float2 pair(int pair) const {
        return *reinterpret_cast<const float2*>(x + place(2 * pair));
    }
};

}  // namespace flashqla::cuda
