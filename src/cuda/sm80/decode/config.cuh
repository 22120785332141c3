// Who holds what. A block keeps a strip of columns of one state in registers, as the sixteen-byte words of memory:
//
//   vk (rows of K)   one warp, which has whole rows: a piece of memory without gaps. kLanesK lanes share a row
//   kv (rows of V)   kWarps warps, which share the keys; kLanesV lanes side by side read 128 bytes of a row
//
// A lane has kColumns columns of kKeys keys. Small blocks and few words a lane keep memory busy: a block that is done
// makes room at once for the loads of the next.
#pragma once

#include "base/call.hpp"
#include "cuda/device/words.cuh"

namespace flashqla::cuda::sm80 {

template <bool kVFirst_, class State_, int kK_>
struct DecodeConfig {
    using State = State_;
    static constexpr bool kVFirst = kVFirst_;  // StateLayout::vk
    static constexpr int kK = kK_;
    static constexpr int kVec = Words<State>::kSize;  // numbers in a word

    static constexpr int kPieces = kK % 3 == 0 ? 3 : 1;  // vk: words of a lane in a row, as far as 32 lanes are enough
    static constexpr int kLanesInRow = kK / (kVec * kPieces);
    static constexpr int kLanesK = kVFirst ? kLanesInRow < 32 ? kLanesInRow : 32 : 4;
    static constexpr int kLanesV = 32 / kLanesK;
    static constexpr int kKeys = kVFirst ? kK / kLanesK : kVec;
    static constexpr int kWarps = kK / (kLanesK * kKeys);
    static constexpr int kWordsInRow = kKeys / kVec;  // vk
    static constexpr int kColumns = kVFirst ? (kWordsInRow == 1 ? 8 : kWordsInRow == 2 ? 4 : 2) : kVec;
    static constexpr int kWords = kColumns * kKeys / kVec;
    static constexpr int kWidth = kLanesV * kColumns;  // columns of a block

    // Columns that a lane finishes: its share of the reduced sums (vk), or of the block's columns (kv).
    static constexpr int kMine = kVFirst ? 1 : kWidth / 32;
    static constexpr int kThreads = 32 * kWarps;
    // The register budget: 16 warps a multiprocessor at 128 registers a thread.
    static constexpr int kMinBlocks = 16 / kWarps;

    static_assert(kLanesK * kKeys * kWarps == kK && kKeys % 4 == 0 && kMine >= 1 && kColumns % kMine == 0);
    static_assert(kVFirst ? kWarps == 1 && kColumns <= kLanesK : kColumns == kVec);
};

// f(configuration of the call), as a value of its type; `none` where there is none for its K.
template <bool kVFirst, class State, class Result, class F>
Result with_decode_width(std::int32_t dim_k, Result none, F&& f) {
    switch (dim_k) {
        case 64: return f(DecodeConfig<kVFirst, State, 64>{});
        case 96: return f(DecodeConfig<kVFirst, State, 96>{});
        case 128: return f(DecodeConfig<kVFirst, State, 128>{});
        case 192: return f(DecodeConfig<kVFirst, State, 192>{});
        case 256: return f(DecodeConfig<kVFirst, State, 256>{});
        default: return none;
    }
}

template <bool kVFirst, class Result, class F>
Result with_decode_config(const DecodeCall& call, Result none, F&& f) {
    const std::int32_t dim_k = call.problem.dim_k;
    switch (call.state.dtype) {
        case DType::f32: return with_decode_width<kVFirst, float>(dim_k, none, f);
        case DType::bf16: return with_decode_width<kVFirst, __nv_bfloat16>(dim_k, none, f);
        case DType::f16: return with_decode_width<kVFirst, __half>(dim_k, none, f);
        default: return none;
    }
}

}  // namespace flashqla::cuda::sm80
