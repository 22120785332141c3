// CUDA's words for a C++ compiler; comes before everything else in every file of src/cuda.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <vector_functions.h>
#include <vector_types.h>

#include "block.hpp"

#undef __device__
#undef __global__
#undef __host__
#undef __shared__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __device__
#define __global__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define gridDim emulator::grid_size

inline void __syncthreads() { emulator::barrier(); }
inline void __syncwarp(unsigned = 0) {
    emulator::meet([](emulator::Lane*) {});
}

template <class T>
T __shfl_xor_sync(unsigned, T x, int mask, int = 32) {
    return emulator::from_lane(x, emulator::lane_index() ^ static_cast<unsigned>(mask));
}
template <class T>
T __shfl_sync(unsigned, T x, int lane, int width = 32) {
    const int first = static_cast<int>(emulator::lane_index()) / width * width;
    return emulator::from_lane(x, static_cast<unsigned>(first + (lane & (width - 1))));
}
template <class T>
T __shfl_up_sync(unsigned, T x, int delta, int width = 32) {
    const int lane = static_cast<int>(emulator::lane_index());
    return emulator::from_lane(x, static_cast<unsigned>(lane % width >= delta ? lane - delta : lane));
}
template <class T>
T __shfl_down_sync(unsigned, T x, int delta, int width = 32) {
    const int lane = static_cast<int>(emulator::lane_index());
    return emulator::from_lane(x, static_cast<unsigned>(lane % width + delta < width ? lane + delta : lane));
}
inline unsigned __ballot_sync(unsigned, bool is) {
    emulator::my_lane().in[0] = is;
    emulator::meet([](emulator::Lane* lanes) {
        unsigned ballot = 0;
        for (int i = 0; i < 32; ++i) ballot |= lanes[i].in[0] << i;
        for (int i = 0; i < 32; ++i) lanes[i].out[0] = ballot;
    });
    return emulator::my_lane().out[0];
}

// Hints for caches.
template <class T>
T __ldcs(const T* from) {
    return *from;
}
template <class T>
void __stcs(T* to, T x) {
    *to = x;
}

// NOTE: blocks run one after the other.
inline unsigned atomicAdd(unsigned* to, unsigned x) { return std::exchange(*to, *to + x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline std::uint32_t __umulhi(std::uint32_t a, std::uint32_t b) {
    return static_cast<std::uint32_t>((std::uint64_t(a) * b) >> 32);
}
inline float __uint_as_float(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
}
inline std::uint32_t __float_as_uint(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits;
}
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    const auto fma_of = [](__half x, __half y, __half z) {
        return __float2half_rn(
            static_cast<float>(static_cast<double>(__half2float(x)) * __half2float(y) + __half2float(z)));
    };
    return __halves2half2(fma_of(__low2half(a), __low2half(b), __low2half(c)),
                          fma_of(__high2half(a), __high2half(b), __high2half(c)));
}
inline bool __any_sync(unsigned mask, bool is) { return __ballot_sync(mask, is) != 0; }

using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;
