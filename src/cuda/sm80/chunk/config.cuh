// Who holds what. A block has 64 or 128 columns of V, a warp 16 of them for all of K: S^T in its registers, as
// accumulators.
#pragma once

#include "cuda/device/shared_tile.cuh"
#include "cuda/sm80/chunk/params.hpp"

namespace flashqla::cuda::sm80 {

template <class Op_, int kK_, int kColumns_>
struct ChunkConfig {
    using Op = Op_;
    static constexpr int kK = kK_;  // keys, the last ones zero when dim_k is smaller
    static constexpr int kChunk = chunk_tokens(Op::kParts, kK), kBlocks = kChunk / 16;
    static constexpr int kColumns = kColumns_;  // of V that a block holds
    static constexpr int kWarps = kColumns / 16, kThreads = 32 * kWarps;
    // All registers that a thread can have. NOTE: with a third block a multiprocessor the walk spills and is slower.
    static constexpr int kMinBlocks = 256 / kThreads;
};

// Everything a chunk needs.
template <class Config>
struct ChunkStage {
    using Op = typename Config::Op;
    static constexpr int kChunk = Config::kChunk;
    using Attention = SharedTriangle<Op, kChunk>;

    SharedTile<Op, kChunk, Config::kK> k, q;
    SharedTile<Op, kChunk, Config::kColumns> v;  // then o, on its way out
    // The first bytes of a PreparedChunk.
    struct {
        alignas(16) float beta[kChunk], read[kChunk], query[kChunk], keep[kChunk], total[4];
        SharedTriangle<TwoParts<Op>, kChunk> inverse;
        Attention attention;
    } prepared;
    static constexpr int kWithAttention = sizeof(prepared), kWithoutAttention = kWithAttention - sizeof(Attention);
};

}  // namespace flashqla::cuda::sm80
