// Who holds what. A block has a chunk of a key head: a warp owns 16 tokens and a part of K in dQ and dK, which stay in
// registers until all value heads have been added up, and up to two 16x16 blocks of one of the two triangles.
#pragma once

#include "cuda/device/blocked_tile.cuh"
#include "cuda/device/token_tile.cuh"
#include "cuda/sm80/chunk/params.hpp"
#include "cuda/sm80/gradient/params.hpp"

namespace flashqla::cuda::sm80 {

template <class Op_, int kK_, int kColumns_>
struct GradientConfig {
    using Op = Op_;
    static constexpr int kK = kK_;              // keys, the last ones zero when dim_k is smaller
    static constexpr int kColumns = kColumns_;  // of V at a time
    static constexpr int kChunk = chunk_tokens(Op::kParts, kK), kBlocks = kChunk / 16;
    // As many warps as registers and K leave room for: the more, the better are loads and exchanges hidden.
    static constexpr int kWarps = kK / 16 * kBlocks < 16 ? kK / 16 * kBlocks : 16, kThreads = 32 * kWarps;
    static constexpr int kSides = kWarps / kBlocks;                // warps side by side along K
    static constexpr int kWidth = kK / kSides;                     // keys of a warp
    static constexpr int kTriangle = kBlocks * (kBlocks + 1) / 2;  // blocks of a triangle
    static constexpr int kSharers = kWarps / 2;                    // warps that share a triangle
    static constexpr int kSlots = (kTriangle + kSharers - 1) / kSharers;
    static_assert(kBlocks <= 4 && kWidth % 16 == 0 && kWidth <= 32);
};

// A tile of V of one value head.
template <class Config>
struct GradientStage {
    using Op = typename Config::Op;
    BlockedTile<Op, Config::kColumns, Config::kK> state, adjoint;  // S^T, D^T
    SharedTile<Op, Config::kChunk, Config::kColumns> d_o, v;
    BlockedTile<Op, Config::kColumns, Config::kChunk> deltas, residuals;  // X^T, W'^T
};

// What a PreparedChunk says about rows: its beginning and its end.
template <int kChunk>
struct RowFactors {
    alignas(16) float beta[kChunk], read[kChunk], query[kChunk], keep[kChunk], total[4];
    alignas(16) float high[kChunk], low[kChunk], norm_k[kChunk], norm_q[kChunk];
};

template <class Config>
struct GradientShared {
    using Op = typename Config::Op;
    static constexpr int kChunk = Config::kChunk, kTerms = Op::kParts == 1 ? 2 : 1;

    SharedTile<Op, kChunk, Config::kK> k, q;
    RowFactors<kChunk> factors[2];  // of this head and the next
    // Gamma o P' and Z of the heads so far, a lane's accumulators of each block side by side.
    float4 sums[2][Config::kTriangle][2][32];
    // Sums over parts of a row, until the end of a head.
    float query_dots[Config::kSides][kChunk];                                 // <q_i, (dO S^T)_i>
    float read_dots[Config::kSides][kChunk];                                  // <k_i, (W' S^T)_i>
    float keep_dots[Config::kSides][kChunk];                                  // <k_i, (X D^T)_i>
    float value_dots[Config::kSides][kChunk];                                 // <W'_i, v_i>
    float rows[2][Config::kTriangle][16], columns[2][Config::kTriangle][16];  // of each block of H, by triangle
    float along[Config::kWarps];                                              // <D, S>
    // As many stages as the launch says; at the end the two triangles, when no stage is needed any more.
    union {
        GradientStage<Config> first_stage;
        struct {
            // 16-bit operands: the rounded number and what rounding has taken away, since one rounding for the whole
            // group would still be the largest error of dQ and dK.
            SharedTriangle<Op, kChunk> weight[kTerms], z[kTerms];
        } triangles;
    };
    static_assert(sizeof(triangles) <= sizeof(first_stage));
};

template <class Config>
constexpr std::size_t gradient_bytes(int stages) {
    return sizeof(GradientShared<Config>) + std::size_t(stages - 1) * sizeof(GradientStage<Config>);
}

}  // namespace flashqla::cuda::sm80
