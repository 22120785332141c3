// Who holds what. A block has 64 columns of V, a warp 16 of them for all of K: D^T in its registers, as accumulators.
#pragma once

#include "cuda/device/shared_tile.cuh"
#include "cuda/sm80/adjoint/params.hpp"
#include "cuda/sm80/chunk/params.hpp"

namespace flashqla::cuda::sm80 {

template <class Op_, int kK_>
struct AdjointConfig {
    using Op = Op_;
    static constexpr int kK = kK_;  // keys, the last ones zero when dim_k is smaller
    static constexpr int kChunk = chunk_tokens(Op::kParts, kK), kBlocks = kChunk / 16;
    static constexpr int kColumns = kChunkColumns;
    static constexpr int kWarps = kColumns / 16, kThreads = 32 * kWarps;
    static constexpr int kMinBlocks = 2;  // the register budget: 255 a thread
};

// Everything a chunk needs.
template <class Config>
struct AdjointStage {
    using Op = typename Config::Op;
    static constexpr int kChunk = Config::kChunk;

    SharedTile<Op, kChunk, Config::kK> k, q;
    SharedTile<Op, kChunk, Config::kColumns> d_o;  // then d_v, on its way out
    // The first bytes of a PreparedChunk.
    struct {
        alignas(16) float beta[kChunk], read[kChunk], query[kChunk], keep[kChunk], total[4];
        SharedTriangle<TwoParts<Op>, kChunk> inverse;
        SharedTriangle<Op, kChunk> attention;
    } prepared;
};

}  // namespace flashqla::cuda::sm80
