// Who holds what. A block keeps a [K, kColumns] tile of one state in registers, each thread 8 groups of 4 elements that
// are neighbours in memory, so that states move in loads of 16 (f32) or 8 bytes (16-bit types) in both layouts:
//
//   vk (rows of K)   32 lanes (16 for K = 64) side by side along K, each with whole groups of kRows columns
//   kv (rows of V)   kColumns/4 lanes side by side along V; the other lanes and the warps take every kLines-th key
#pragma once

#include "cuda/sm80/recurrent/params.hpp"

namespace flashqla::cuda::sm80 {

template <bool kVFirst_, int kK_>
struct RecurrentConfig {
    static constexpr bool kVFirst = kVFirst_;  // StateLayout::vk
    static constexpr int kK = kK_;             // keys, the last ones unused when dim_k is smaller
    static constexpr int kThreads = 128, kWarps = 4;
    // Blocks a multiprocessor should hold, i.e. the register budget: 128 a thread, or 168 where 128 would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
    static constexpr int kMinBlocks = kVFirst ? 4 : 3;
#else
    static constexpr int kMinBlocks = !kVFirst && kK == 256 ? 3 : 4;
#endif
    static constexpr int kColumns = kRecurrentElements / kK;  // of V
    static constexpr int kGroups = kRecurrentElements / (4 * kThreads);

    // vk
    static constexpr int kLanes = kK / 4 < 32 ? kK / 4 : 32;  // threads that share a column
    static constexpr int kGroupsK = kK / (4 * kLanes);        // groups of a thread in a column
    static constexpr int kRows = kGroups / kGroupsK;          // columns of a thread

    // kv
    static constexpr int kLanesV = kColumns / 4;                       // threads that share a key
    static constexpr int kLines = kThreads / kLanesV;                  // keys that the block works on at a time
    static constexpr int kPerThread = (kK + kThreads - 1) / kThreads;  // elements of q and k that a thread loads

    static_assert(kGroups == 8 && kColumns <= kThreads);
    static_assert(kThreads / kLanes * kRows == kColumns && kLines * kGroups == kK);
};

template <class Config>
struct RecurrentShared {
    // Two tokens each: while one is read the next is written, so that a barrier a token is enough.
    alignas(16) float k[2][Config::kK];
    alignas(16) float q[2][Config::kK];
    alignas(16) float v[2][Config::kColumns];
    alignas(16) float sums[2][3][Config::kWarps];  // k.k, q.q, k.q of a warp's elements
    // kv: S^T k and S^T q over the keys of a warp.
    alignas(16) float reads[Config::kVFirst ? 1 : Config::kWarps][2][Config::kVFirst ? 4 : Config::kColumns];
};

}  // namespace flashqla::cuda::sm80
