// Sums across lanes of a warp.
#pragma once

namespace flashqla::cuda {

inline constexpr unsigned kFullWarp = 0xffffffffu;

// The sum over lanes that differ in bits kFrom, 2 kFrom, ... below kTo, in every one of them.
template <int kFrom, int kTo, class T>
__device__ __forceinline__ T sum_lanes(T x) {
#pragma unroll
    for (int bit = kFrom; bit < kTo; bit *= 2) x += __shfl_xor_sync(kFullWarp, x, bit);
    return x;
}

template <class T>
__device__ __forceinline__ T warp_sum(T x) {
    return sum_lanes<1, 32>(x);
}

// kRows sums over kLanes neighbouring lanes at once; lane i of them gets the sum of row i % kRows. Each exchange halves
// the rows a lane still works on, so 8 rows over 32 lanes take 9 shuffles and not 40.
template <int kRows, int kLanes>
__device__ __forceinline__ float sum_rows(float (&x)[kRows], int lane) {
    static_assert(kRows <= kLanes && kLanes <= 32);
#pragma unroll
    for (int half = kRows / 2; half > 0; half /= 2) {
        const bool upper = (lane & half) != 0;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float give = upper ? x[i] : x[i + half], keep = upper ? x[i + half] : x[i];
            x[i] = keep + __shfl_xor_sync(kFullWarp, give, half);
        }
    }
    return sum_lanes<kRows, kLanes>(x[0]);
}

}  // namespace flashqla::cuda
