// Who holds what. A block has 64 or 128 columns of V: a warpgroup for each 64 of them, with S^T in its registers, and
// one more that loads.
#pragma once

#include "cuda/device/pipeline.cuh"
#include "cuda/device/state_walk.cuh"
#include "cuda/device/swizzled_tile.cuh"
#include "cuda/sm90/chunk/params.hpp"

namespace flashqla::cuda::sm90 {

template <class Op_, int kK_, int kColumns_>
struct ChunkConfig {
    using Op = Op_;
    static constexpr int kK = kK_;  // keys, the last ones zero when dim_k is smaller
    static constexpr int kChunk = 64, kBlocks = kChunk / 16;
    static constexpr int kColumns = kColumns_;  // of V that a block holds
    static constexpr int kGroups = kColumns / 64, kConsumers = 128 * kGroups, kLoaders = 128;
    static constexpr int kThreads = kConsumers + kLoaders;
    static constexpr int kStages = 3;
    // NOTE: with two computing warpgroups every thread would have 168 registers; with one it has enough as it is.
    static constexpr bool kShiftRegisters = kGroups > 1;
    static constexpr int kConsumerRegisters = 224, kLoaderRegisters = 56;
};

// Everything a chunk needs.
template <class Config>
struct ChunkStage {
    using Op = typename Config::Op;
    using Element = typename Op::Element;
    static constexpr int kChunk = Config::kChunk;

    SwizzledTile<Op, kChunk, Config::kK> k, q;
    SwizzledTile<Op, kChunk, Config::kColumns> v;  // then o, on its way out
    TrianglePanels<Element, 2, Rows::along_k> inverse;
    TrianglePanels<Element, 1, Rows::along_k> attention;
    alignas(16) float beta[kChunk], read[kChunk], query[kChunk], keep[kChunk], total[4];  // as in PreparedChunk
};

template <class Config>
struct ChunkShared {
    ChunkStage<Config> stages[Config::kStages];
    Barrier full[Config::kStages], empty[Config::kStages];
    StatePlace place;
};

}  // namespace flashqla::cuda::sm90
