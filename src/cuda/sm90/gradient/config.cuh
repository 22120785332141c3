// Who holds what. A block takes a chunk of a key head after the other: two warps load, two warpgroups compute, two more
// warps finish tokens. A computing warpgroup has all 64 tokens and half of K in dQ and dK, and every second block of 8
// columns of the two triangles.
#pragma once

#include "cuda/device/pipeline.cuh"
#include "cuda/device/swizzled_tile.cuh"
#include "cuda/sm80/gradient/config.cuh"
#include "cuda/sm90/gradient/params.hpp"

namespace flashqla::cuda::sm90 {

template <class Op_, int kK_>
struct GradientConfig {
    using Op = Op_;
    static constexpr int kK = kK_;  // keys, the last ones zero when dim_k is smaller
    static constexpr int kChunk = 64, kColumns = 64;
    static constexpr int kHalves = 2, kWidth = kK / kHalves;  // keys of a warpgroup
    static constexpr int kConsumers = 128 * kHalves, kLoaders = 64, kFinishers = kChunk;
    static constexpr int kThreads = kConsumers + kLoaders + kFinishers;
    static constexpr int kStages = 2, kRows = 2, kHeads = 2;
    // NOTE: a head's factors come with its first tile and are read until its end, when the loads may be two heads
    // further.
    static constexpr int kFactors = 3;
    static constexpr int kConsumerRegisters = 232, kOtherRegisters = 40;
};

// A chunk's rows of a key head.
template <class Config>
struct GradientRows {
    SwizzledTile<typename Config::Op, Config::kChunk, Config::kK> q, k;  // then d_q and d_k, on their way out
};

// Which they are. No tokens: there is nothing more to do.
struct GradientItem {
    std::int64_t number, batch, begin;  // of the chunk; its first token
    std::int32_t tokens, key_head;
};

// A tile of V of one value head. At the end of a group the last one has room for the triangles as operands: the rounded
// number and what rounding has taken away, since one rounding for the whole group would be the largest error of dQ, dK.
template <class Config>
struct GradientStage {
    using Op = typename Config::Op;
    static constexpr int kChunk = Config::kChunk, kColumns = Config::kColumns;
    struct Triangles {
        SwizzledTile<Op, kChunk, kChunk> weight[2], z[2];
    };
    struct Tiles {
        SwizzledTile<Op, kChunk, kColumns> d_o, v;
        BlockedTile<Op, kColumns, Config::kK> state, adjoint;  // S^T, D^T
        BlockedTile<Op, kColumns, kChunk> deltas, residuals;   // X^T, W'^T
    };
    union {
        Tiles tiles;
        Triangles triangles;
    };
};

// What the two halves know of a head's tokens: sums over their keys, columns of V and columns of the triangles.
template <class Config>
struct HeadSums {
    static constexpr int kChunk = Config::kChunk, kHalves = Config::kHalves;
    double gamma[kHalves][kChunk];      // gamma_of_token()
    float beta[kHalves][kChunk];        // beta_of_token()
    float keep[kHalves][kChunk];        // keep_i <k_i, (X D^T)_i>
    float leaves[kHalves * 2][kChunk];  // of columns of H, 16 rows each
    float along[4 * kHalves];           // <D, S>, by warps
    float total;                        // exp(gamma_C)
    std::int32_t tokens;                // none: there is nothing more to do
    std::int64_t at;                    // where the first one's gradients go
};

template <class Config>
struct GradientShared {
    GradientRows<Config> rows[Config::kRows];
    GradientStage<Config> stages[Config::kStages];
    // Gamma o P' and Z of the heads so far: a lane's accumulators of the blocks that reach below the diagonal.
    float4 sums[Config::kHalves][10][2][32];
    sm80::RowFactors<Config::kChunk> factors[Config::kFactors];
    HeadSums<Config> heads[Config::kHeads];
    float along_rows[2][Config::kHalves][Config::kChunk];  // <q_i, dQ_i>, <k_i, dK_i>
    GradientItem items[Config::kRows];
    Barrier full[Config::kStages], empty[Config::kStages], rows_full[Config::kRows], rows_empty[Config::kRows];
    Barrier heads_full[Config::kHeads], heads_empty[Config::kHeads];
};

}  // namespace flashqla::cuda::sm90
