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

// The sum over this lane and those before it.
__device__ __forceinline__ double warp_prefix(double x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const double other = __shfl_up_sync(kFullWarp, x, step);
        if (static_cast<int>(threadIdx.x % 32) >= step) x += other;
    }
    return x;
}

// kRows sums over kLanes lanes at once, lanes that lie kStride apart, of which this is number `lane`. Each exchange
// halves the rows a lane still works on, so 8 rows over 32 lanes take 9 shuffles and not 40. Afterwards x[0] is the sum
// of row lane % kRows; with more rows than lanes, x[i] is that of row lane * (kRows / kLanes) + i.
template <int kRows, int kLanes, int kStride = 1>
__device__ __forceinline__ void share_sums(float (&x)[kRows], int lane) {
    static_assert(kLanes * kStride <= 32);
    constexpr int kSplits = kRows < kLanes ? kRows : kLanes;
#pragma unroll
    for (int split = 2; split <= kSplits; split *= 2) {
        const int bit = kSplits / split, half = kRows / split;
        const bool upper = (lane & bit) != 0;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float give = upper ? x[i] : x[i + half], keep = upper ? x[i + half] : x[i];
            x[i] = keep + __shfl_xor_sync(kFullWarp, give, bit * kStride);
        }
    }
    if constexpr (kRows < kLanes) x[0] = sum_lanes<kRows * kStride, kLanes * kStride>(x[0]);
}

// The same over neighbouring lanes; lane i gets the sum of row i % kRows.
template <int kRows, int kLanes>
__device__ __forceinline__ float sum_rows(float (&x)[kRows], int lane) {
    static_assert(kRows <= kLanes);
    share_sums<kRows, kLanes>(x, lane);
    return x[0];
}

}  // namespace flashqla::cuda
