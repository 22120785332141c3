// Who holds what. A warp owns 16 rows of the chunk in both triangles, and 16 columns of the inverse.
#pragma once

#include "cuda/device/shared_tile.cuh"
#include "cuda/sm80/prepare/params.hpp"

namespace flashqla::cuda::sm80 {

template <class Op_, int kK_>
struct PrepareConfig {
    using Op = Op_;
    static constexpr int kK = kK_;  // keys, the last ones zero when dim_k is smaller
    static constexpr int kChunk = chunk_tokens(Op::kParts, kK);
    static constexpr int kBlocks = kChunk / 16;  // rows of 16x16 blocks
    static constexpr int kWarps = kBlocks, kThreads = 32 * kWarps;
    static constexpr int kMinBlocks = kK <= 128 ? 512 / kThreads : 256 / kThreads;  // as shared memory allows
    using Record = PreparedChunk<typename Op::Element, Op::kParts, kChunk>;
};

template <class Config>
struct PrepareShared {
    static constexpr int kChunk = Config::kChunk;
    using Op = typename Config::Op;
    using Rows = SharedTile<Op, kChunk, Config::kK>;
    using Inverse = SharedTriangle<TwoParts<Op>, kChunk>;
    using Attention = SharedTriangle<Op, kChunk>;

    // The rows are not read any more when the first triangle is written.
    union {
        Rows k;
        Inverse inverse;
    };
    union {
        Rows q;
        Attention attention;
    };
    // L below the diagonal blocks, the inverses of the diagonal blocks in them. Two bf16 parts whatever the operands
    // are: what the inverse is made of is more exact than what it is rounded to.
    SharedTriangle<F32Operand, kChunk> lower;
    alignas(16) float diagonal[Config::kBlocks][16][20];  // diagonal blocks of L
    float norm_k[kChunk], norm_q[kChunk];
    // Of as many heads as there are warps; each warp fills one.
    float high[Config::kWarps][kChunk], low[Config::kWarps][kChunk], beta[Config::kWarps][kChunk];
};

}  // namespace flashqla::cuda::sm80
