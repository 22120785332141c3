// What the matrix units multiply. 16-bit inputs are operands as they are. An fp32 number is the sum of two bf16 parts,
// 16 bits of its 24, and a product is three products of parts: the error is below 2^-16 of what fp32 would give.
//
// A kernel is written once for fragments of either kind.
#pragma once

#include <cstdint>

#include "cuda/device/memory.cuh"
#include "cuda/device/mma.cuh"

namespace flashqla::cuda {

struct Bf16Operand {
    using Input = __nv_bfloat16;    // element of q, k, v
    using Element = __nv_bfloat16;  // element of a fragment
    static constexpr int kParts = 1;
};
struct F16Operand {
    using Input = __half;
    using Element = __half;
    static constexpr int kParts = 1;
};
struct F32Operand {
    using Input = float;
    using Element = __nv_bfloat16;
    static constexpr int kParts = 2;
};

// An fp32 number as the sum of two in tf32, 22 of its 24 bits.
struct Tf32Parts {
    std::uint32_t high, low;

    static __device__ __forceinline__ Tf32Parts of(float x) {
        const std::uint32_t high = __float_as_uint(x) & kTf32Mask;
        return {high, __float_as_uint(x - __uint_as_float(high))};
    }
};

// The same elements, two of them for each number: for what has to be more exact than the inputs are.
template <class Op>
struct TwoParts : Op {
    static constexpr int kParts = 2;
};

template <class T>
__device__ __forceinline__ std::uint32_t bits_of(T pair) {
    std::uint32_t x;
    static_assert(sizeof(pair) == sizeof(x));
    memcpy(&x, &pair, sizeof(x));
    return x;
}

__device__ __forceinline__ std::uint32_t pack(float low, float high, __nv_bfloat16) {
    return bits_of(__floats2bfloat162_rn(low, high));
}
__device__ __forceinline__ std::uint32_t pack(float low, float high, __half) {
    return bits_of(__floats2half2_rn(low, high));
}
__device__ __forceinline__ float2 unpack(std::uint32_t x, __nv_bfloat16) {
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}
__device__ __forceinline__ float2 unpack(std::uint32_t x, __half) {
    __half2 h;
    memcpy(&h, &x, sizeof(h));
    return __half22float2(h);
}

// A pair of neighbours as parts.
template <class Op>
struct Pair {
    std::uint32_t part[Op::kParts];

    static __device__ __forceinline__ Pair of(float low, float high) {
        typename Op::Element type{};
        Pair pair;
        pair.part[0] = pack(low, high, type);
        if constexpr (Op::kParts == 2) {
            const float2 rounded = unpack(pair.part[0], type);
            pair.part[1] = pack(low - rounded.x, high - rounded.y, type);
        }
        return pair;
    }
    __device__ __forceinline__ float2 value() const {
        float2 sum = unpack(part[0], typename Op::Element{});
        if constexpr (Op::kParts == 2) {
            const float2 low = unpack(part[1], typename Op::Element{});
            sum.x += low.x, sum.y += low.y;
        }
        return sum;
    }
};

// A 16x16 fragment: as A one matrix, as B two neighbours of eight columns. x[part][block].
template <class Op>
struct Fragment {
    std::uint32_t x[Op::kParts][4];

    __device__ __forceinline__ void set(int block, Pair<Op> pair) {
#pragma unroll
        for (int part = 0; part < Op::kParts; ++part) x[part][block] = pair.part[part];
    }
    __device__ __forceinline__ Pair<Op> pair(int block) const {
        Pair<Op> pair;
#pragma unroll
        for (int part = 0; part < Op::kParts; ++part) pair.part[part] = x[part][block];
        return pair;
    }
    // Two neighbouring accumulators (16 rows, 16 columns) as an A fragment.
    static __device__ __forceinline__ Fragment of(const float (&left)[4], const float (&right)[4]) {
        Fragment f;
        f.set(0, Pair<Op>::of(left[0], left[1]));
        f.set(1, Pair<Op>::of(left[2], left[3]));
        f.set(2, Pair<Op>::of(right[0], right[1]));
        f.set(3, Pair<Op>::of(right[2], right[3]));
        return f;
    }
};

// Two neighbouring accumulators += A B.
template <class Op>
__device__ __forceinline__ void multiply(float (&left)[4], float (&right)[4], const Fragment<Op>& a,
                                         const Fragment<Op>& b) {
    typename Op::Element type{};
    mma_16x8x16(left, a.x[0], b.x[0][0], b.x[0][1], type);
    mma_16x8x16(right, a.x[0], b.x[0][2], b.x[0][3], type);
    if constexpr (Op::kParts == 2) {
        mma_16x8x16(left, a.x[0], b.x[1][0], b.x[1][1], type);
        mma_16x8x16(right, a.x[0], b.x[1][2], b.x[1][3], type);
        mma_16x8x16(left, a.x[1], b.x[0][0], b.x[0][1], type);
        mma_16x8x16(right, a.x[1], b.x[0][2], b.x[0][3], type);
    }
}

}  // namespace flashqla::cuda
