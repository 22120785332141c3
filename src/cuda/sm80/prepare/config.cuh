// Who holds what. The warps of a block share the products of rows; from then on a warp does one half of a value head
// alone, its inverse or its attention triangle.
#pragma once

#include "cuda/device/shared_tile.cuh"
#include "cuda/sm80/prepare/params.hpp"

namespace flashqla::cuda::sm80 {

// A product of rows as the warps have it, 16x16 blocks on and below the diagonal: of each the two accumulators of every
// lane.
template <int kBlocks>
struct RowProducts {
    float4 x[kBlocks * (kBlocks + 1) / 2][2][32];

    __device__ __forceinline__ float4& at(int row, int column, int n) {
        return x[row * (row + 1) / 2 + column][n][threadIdx.x % 32];
    }
    __device__ __forceinline__ const float4& at(int row, int column, int n) const {
        return x[row * (row + 1) / 2 + column][n][threadIdx.x % 32];
    }
};

// The diagonal blocks of a lower triangle, of each the three 8x8 blocks on and below its diagonal. The strides keep the
// lanes of every access in different banks.
template <int kBlocks>
struct DiagonalBlocks {
    static constexpr int kBlock = 3 * 64 + 8;
    alignas(16) float x[kBlocks * kBlock];

    __device__ __forceinline__ float* at(int block, int row, int column) {
        return x + block * kBlock + (row / 8 + column / 8) * 64 + row % 8 * 8 + column % 8;
    }
};

// What the triangles of one value head are made of besides the products. Octets are runs of eight tokens. The decay
// between tokens of different octets is the product of three factors none of which exceeds 1 unless gates grow:
// from the end of the octet before to token i, between octets, and from token j to the end of its octet. Within an
// octet, and anywhere in a chunk of 32 tokens, it is the exponential of a difference of sums.
template <int kChunk>
struct HeadFactors {
    static constexpr int kOctets = kChunk / 8;
    alignas(16) float high[kChunk], low[kChunk];     // running sum of g
    float row_lower[kChunk], row_attention[kChunk];  // -beta_i n_k,i and scale n_q,i, times the first factor
    float column[kChunk];                            // n_k,j times the third factor
    float own_lower[kChunk];                         // -beta_i n_k,i
    float between[kOctets][kOctets];                 // the second factor
    std::int64_t record;                             // number of the head's, here because registers are scarce
};

template <class Op_, int kK_>
struct PrepareConfig {
    using Op = Op_;
    static constexpr int kK = kK_;  // keys, the last ones zero when dim_k is smaller
    static constexpr int kChunk = chunk_tokens(Op::kParts, kK);
    static constexpr int kBlocks = kChunk / 16;  // rows of 16x16 blocks
    static constexpr int kOctets = kChunk / 8;   // rows of 8x8 blocks
    static constexpr int kWarps = 4, kThreads = 32 * kWarps;
    static constexpr int kHeads = kMostPreparedHeads;
    static_assert(kHeads <= kWarps);  // a warp has the gates of one
    static constexpr int kMinBlocks = kK <= 128 ? 4 : 2;
    using Record = PreparedChunk<typename Op::Element, Op::kParts, kChunk>;
};

template <class Config>
struct PrepareShared {
    static constexpr int kChunk = Config::kChunk;
    using Op = typename Config::Op;
    using Rows = SharedTile<Op, kChunk, Config::kK>;
    struct Inputs {
        Rows k, q;
    };
    // Rows are not read any more when their products are written.
    struct Products {
        RowProducts<Config::kBlocks> kk, qk;
        DiagonalBlocks<Config::kBlocks> diagonal[Config::kWarps];
    };
    union {
        Inputs rows;
        Products products;
    };
    HeadFactors<kChunk> heads[Config::kHeads];
    int head_count;
    alignas(16) float norm_k[kChunk], norm_q[kChunk];
};

}  // namespace flashqla::cuda::sm80
