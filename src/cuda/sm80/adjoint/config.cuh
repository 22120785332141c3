// Who holds what. A block has 64 columns of V, a warp 16 of them for all of K, or for one of kSplit parts of it: D^T in
// its registers, as accumulators. With two parts a step takes fewer instructions of each warp, which is what counts
// when every multiprocessor has a single block, but more of all warps together.
#pragma once

#include "cuda/device/shared_tile.cuh"
#include "cuda/sm80/adjoint/params.hpp"
#include "cuda/sm80/chunk/params.hpp"

namespace flashqla::cuda::sm80 {

template <class Op_, int kK_, int kSplit_>
struct AdjointConfig {
    using Op = Op_;
    static constexpr int kK = kK_;  // keys, the last ones zero when dim_k is smaller
    static constexpr int kChunk = chunk_tokens(Op::kParts, kK), kBlocks = kChunk / 16;
    static constexpr int kColumns = kChunkColumns;
    static constexpr int kSplit = kSplit_, kKeys = kK / kSplit;  // of a warp
    static constexpr int kLines = kColumns / 16;                 // warps with the same keys
    static constexpr int kWarps = kLines * kSplit, kThreads = 32 * kWarps;
    static constexpr int kMinBlocks = 2 / kSplit;  // the register budget: 255 a thread
    static_assert(kSplit <= 2 && kBlocks % kSplit == 0);
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

// D^T K^T of a warp's keys, for the warp that has the others.
template <class Config, int kSplit = Config::kSplit>
struct AdjointExchange {
    float4 sums[Config::kWarps][2 * Config::kBlocks][32];
};
template <class Config>
struct AdjointExchange<Config, 1> {};

template <class Config>
struct AdjointShared {
    AdjointStage<Config> stage;  // as many as the launch says; the exchange lies behind them
    static constexpr std::size_t bytes(int stages) {
        return stages * sizeof(AdjointStage<Config>) + (Config::kSplit > 1 ? sizeof(AdjointExchange<Config>) : 0);
    }
};

}  // namespace flashqla::cuda::sm80
