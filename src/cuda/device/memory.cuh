// Loads and stores of the three element types as float: one element, or four neighbours at once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "flashqla/flashqla.hpp"

namespace flashqla::cuda {

// x, as something that the compiler cannot know before this point. NOTE: without it offsets that are made of strides
// are computed before a long loop and kept in registers all through it, dozens of them, and spill.
__device__ __forceinline__ std::int64_t only_here(std::int64_t x) {
    asm volatile("" : "+l"(x));
    return x;
}
__device__ __forceinline__ int only_here(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
    return __float2half_rn(x);
}

// Four elements that one instruction moves.
template <class T>
struct alignas(4 * sizeof(T)) Four {
    T x[4];
};

template <class T>
__device__ __forceinline__ bool fours_are_aligned(const T* p) {
    return reinterpret_cast<std::uintptr_t>(p) % sizeof(Four<T>) == 0;
}

template <class T>
__device__ __forceinline__ void load_four(const T* p, float (&x)[4]) {
    const Four<T> four = *reinterpret_cast<const Four<T>*>(p);
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = to_float(four.x[j]);
}

template <class T>
__device__ __forceinline__ void store_four(T* p, const float (&x)[4]) {
    Four<T> four;
#pragma unroll
    for (int j = 0; j < 4; ++j) four.x[j] = from_float<T>(x[j]);
    *reinterpret_cast<Four<T>*>(p) = four;
}

// Calls f(pointer to the element type) for one of f32, f16, bf16.
template <class F>
__device__ __forceinline__ void with_type(DType dtype, void* data, F&& f) {
    if (dtype == DType::f32) {
        f(static_cast<float*>(data));
    } else if (dtype == DType::bf16) {
        f(static_cast<__nv_bfloat16*>(data));
    } else {
        f(static_cast<__half*>(data));
    }
}

// An element as its bits, so that a load can be issued long before the value is needed: a conversion would wait for it.
__device__ __forceinline__ std::uint32_t load_bits(const void* data, DType dtype, std::int64_t i) {
    return dtype == DType::f32 ? static_cast<const std::uint32_t*>(data)[i]
                               : static_cast<const std::uint16_t*>(data)[i];
}
__device__ __forceinline__ float float_of_bits(std::uint32_t bits, DType dtype) {
    if (dtype == DType::f32) return __uint_as_float(bits);
    if (dtype == DType::bf16) return __uint_as_float(bits << 16);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}
__device__ __forceinline__ float load_element(const void* data, DType dtype, std::int64_t i) {
    return float_of_bits(load_bits(data, dtype, i), dtype);
}

__device__ __forceinline__ void store_element(void* data, DType dtype, std::int64_t i, float x) {
    with_type(dtype, data, [&]<class T>(T* p) { p[i] = from_float<T>(x); });
}

}  // namespace flashqla::cuda
