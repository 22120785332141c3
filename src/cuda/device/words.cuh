// Sixteen bytes of a state as they lie in memory, and the numbers in them. Kept as they are until a number is needed, a
// tile of a 16-bit state takes half the registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flashqla::cuda {

template <class T>
struct Words {
    static constexpr int kSize = 16 / static_cast<int>(sizeof(T));
    std::uint32_t w[4];

    __device__ __forceinline__ float get(int j) const {
        if constexpr (std::is_same_v<T, float>) {
            return __uint_as_float(w[j]);
        } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
            return __uint_as_float(j % 2 ? w[j / 2] & 0xffff0000u : w[j / 2] << 16);
        } else {
            const std::uint32_t bits = j % 2 ? w[j / 2] >> 16 : w[j / 2] & 0xffffu;
            return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
        }
    }
    // Numbers j and j + 1; j is even.
    __device__ __forceinline__ void set(int j, float first, float second) {
        if constexpr (std::is_same_v<T, float>) {
            w[j] = __float_as_uint(first);
            w[j + 1] = __float_as_uint(second);
        } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
            const __nv_bfloat162 two = __floats2bfloat162_rn(first, second);
            w[j / 2] = *reinterpret_cast<const std::uint32_t*>(&two);
        } else {
            const __half2 two = __floats2half2_rn(first, second);
            w[j / 2] = *reinterpret_cast<const std::uint32_t*>(&two);
        }
    }
    __device__ __forceinline__ void zero() { w[0] = w[1] = w[2] = w[3] = 0; }

    // NOTE: marked as not needed again soon, which is so for states; by the time of the next step other layers have
    // taken their place in the caches.
    __device__ __forceinline__ void load(const T* p) {
        const uint4 x = __ldcs(reinterpret_cast<const uint4*>(p));
        w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
    }
    __device__ __forceinline__ void store(T* p) const {
        __stcs(reinterpret_cast<uint4*>(p), make_uint4(w[0], w[1], w[2], w[3]));
    }
};

}  // namespace flashqla::cuda
