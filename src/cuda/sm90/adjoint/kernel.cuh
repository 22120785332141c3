// One block takes some columns of the gradient of one value head's state back through the chunks of a segment, from the
// last chunk to the first, with the products of src/cuda/sm80/adjoint/kernel.cuh on Hopper's matrix units. A warpgroup
// has 64 columns of V as 64 rows of D^T in its registers; every product's A operand comes from registers, B from shared
// memory, where another warpgroup loads chunks ahead:
//
//   X'^T = keep (D^T K^T) + dO^T P        [64,C]   D in two parts
//   W'^T = X'^T T                         [64,C]   both in two parts
//   dV^T = beta W'^T
//   D^T  = total D^T - (read W'^T) K + (query dO^T) Q
#pragma once

#include "cuda/device/chunks.cuh"
#include "cuda/device/grid_order.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/state_rows.cuh"
#include "cuda/device/swizzled_output.cuh"
#include "cuda/device/token_columns.cuh"
#include "cuda/device/token_tile.cuh"
#include "cuda/sm90/adjoint/config.cuh"

namespace flashqla::cuda::sm90 {

template <class Config>
class AdjointWalk {
    using Op = typename Config::Op;
    using Element = typename Op::Element;
    using Stage = typename AdjointShared<Config>::Stage;
    using Record = typename Config::Record;
    static constexpr int kChunk = Config::kChunk, kBlocks = Config::kBlocks, kK = Config::kK;

public:
    __device__ __forceinline__ AdjointWalk(const AdjointParams& params, AdjointShared<Config>& shared,
                                           const Segment& segment, std::int64_t number, std::int32_t head, int tile)
        : params_(params),
          call_(params.call),
          p_(params.call.problem),
          shared_(shared),
          segment_(segment),
          segment_state_((number * p_.heads_v + head) * p_.dim_v * p_.dim_k),
          head_(head),
          v0_(tile * Config::kColumns),
          span_(clamped_span(params.call, segment.n)) {}

    __device__ __forceinline__ void run() {
        if (params_.only_starts && segment_.index == 0) return;
        shared_.template open<true>();
        shared_.share_out([&] { load_all(); }, [&] { walk(); });
    }

private:
    static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x / 32); }
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
    // The lane's columns of an accumulator: this one and the next of each 8.
    static __device__ __forceinline__ int column() { return 2 * (lane() % 4); }

    __device__ __forceinline__ std::int64_t token(std::int32_t c) const {
        return span_.begin + segment_.first_token + std::int64_t(c) * kChunk;
    }
    __device__ __forceinline__ int tokens_of(std::int32_t c) const {
        const std::int64_t left = span_.length - segment_.first_token - std::int64_t(c) * kChunk;
        return static_cast<int>(left < kChunk ? left : kChunk);
    }
    // Of the chunk and head in the workspace.
    __device__ __forceinline__ std::int64_t number(std::int32_t c) const {
        return (segment_.first_chunk + c) * p_.heads_v + head_;
    }

    // ------------------------------------------------------------------------------------------ the loading warpgroup

    __device__ __forceinline__ void load_all() {
        RingPlace<Config::kStages> place;
#pragma unroll 1
        for (std::int32_t c = segment_.chunks - 1; c >= 0; --c) {
            shared_.empty[place.stage].wait(place.round ^ 1);
            Barrier& full = shared_.full[place.stage];
            hand_over(full, load(c, shared_.stages[place.stage], full));
            place.next();
        }
    }

    // Whether all rows come in the background.
    __device__ __forceinline__ bool load(std::int32_t c, Stage& to, Barrier& full) {
        constexpr int kThreads = Config::kLoaders;
        if (threadIdx.x % kThreads < 32) {
            to.template load<true>(static_cast<const Record*>(params_.prepared)[number(c)], full);
        }
        const std::int32_t key_head = call_.key_head(head_);
        const auto rows_of = [&](const TokenRef& x, std::int32_t head, int skip, int columns) {
            return TokenRows::of(x, span_.batch, token(c), head, skip, tokens_of(c), columns);
        };
        bool copied = fill_tokens<kThreads>(to.k, rows_of(call_.k, key_head, 0, p_.dim_k));
        copied &= fill_tokens<kThreads>(to.values, rows_of(call_.d_o, head_, v0_, p_.dim_v - v0_));
        copied &= fill_tokens<kThreads>(to.q, rows_of(call_.q, key_head, 0, p_.dim_k));
        return copied;
    }

    // ---------------------------------------------------------------------------------------- warpgroups that compute

    __device__ __forceinline__ void walk() {
        if (!segment_.last && !params_.only_starts) {
            adjoint_.load_rows(params_.segments.ends + segment_state_, v0_, p_.dim_v, p_.dim_k);
        } else if (segment_.last && call_.d_final_state) {
            adjoint_.load_here(call_.d_final_state, p_, segment_.n, head_, v0_);
        } else {
            adjoint_.zero();
        }
        RingPlace<Config::kStages> place;
#pragma unroll 1
        for (std::int32_t c = segment_.chunks - 1; c >= 0; --c) {
            shared_.full[place.stage].wait(place.round);
            fence_for_wgmma();
            step(c, shared_.stages[place.stage]);
            __syncwarp();
            if (lane() == 0) shared_.empty[place.stage].arrive();
            place.next();
        }
        if (params_.only_starts) {
            adjoint_.store_rows(params_.segments.starts + segment_state_, v0_, p_.dim_v, p_.dim_k);
        } else if (segment_.index == 0 && call_.d_initial_state) {
            adjoint_.store_here(call_.d_initial_state, p_, segment_.n, head_, v0_);
        }
    }

    __device__ __forceinline__ void step(std::int32_t c, Stage& s) {
        constexpr Element kType{};
        const auto keys = s.k.along_k();
        const auto keys_across = s.k.across_k(), queries_across = s.q.across_k();
        const auto inverse = s.inverse.operand();
        const auto attention = s.attention.operand();
        float y[8][4], w[8][4];

        // The system of the deltas takes from D what lies along the keys, which leaves a difference: D takes part with
        // what its rounding takes away.
        {
            Fragment<TwoParts<Op>> adjoint[kK / 16];
#pragma unroll
            for (int k = 0; k < kK / 16; ++k) adjoint[k] = adjoint_.template operand<TwoParts<Op>>(k);
            wgmma_fence();
            wgmma<false, Rows::along_k>(y, adjoint[0].x[0], keys(0), kType);
#pragma unroll
            for (int k = 1; k < kK / 16; ++k) wgmma<true, Rows::along_k>(y, adjoint[k].x[0], keys(16 * k), kType);
#pragma unroll
            for (int k = 0; k < kK / 16; ++k) wgmma<true, Rows::along_k>(y, adjoint[k].x[1], keys(16 * k), kType);
            wgmma_commit();
            if (!params_.only_starts) store_adjoint(c, adjoint);
        }
        Fragment<Op> d_o[kBlocks];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) d_o[b] = s.values.a_transposed(16 * b, 16 * warp());
        wgmma_wait<0>();

        // X'^T: what outputs of this token and later ones read is added to what the state kept.
#pragma unroll
        for (int n = 0; n < 8; ++n) scale_columns(y[n], s.keep, 8 * n);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
            wgmma<true, Rows::across_k>(y, d_o[i].x[0], attention(0, i), kType);
        }
        wgmma_commit();
        wgmma_wait<0>();

        // W'^T. X' is summed over tokens with either sign: its first rounding error would be what is left of sums that
        // cancel, so it has two parts, as T has.
        {
            Fragment<TwoParts<Op>> x[kBlocks];
#pragma unroll
            for (int j = 0; j < kBlocks; ++j) x[j] = Fragment<TwoParts<Op>>::of(y[2 * j], y[2 * j + 1]);
            wgmma_fence();
            wgmma_in_two_parts<Rows::across_k, Op>(w, x, inverse);
            wgmma_commit();
        }
        // What does not need W', meanwhile.
        adjoint_.scale(s.total[0]);
        Fragment<Op> out[kBlocks];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) out[b] = scaled(d_o[b], s.query, 16 * b);
        wgmma_wait<0>();

        Fragment<Op> read[kBlocks];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            float x[2][4];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float2 f = pair_of(s.read, 16 * b + 8 * n + column());
                const float* from = w[2 * b + n];
                x[n][0] = -f.x * from[0], x[n][1] = -f.y * from[1], x[n][2] = -f.x * from[2], x[n][3] = -f.y * from[3];
            }
            read[b] = Fragment<Op>::of(x[0], x[1]);
        }
        wgmma_fence();
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            wgmma<true, Rows::across_k>(adjoint_.s, out[b].x[0], queries_across(16 * b), kType);
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            wgmma<true, Rows::across_k>(adjoint_.s, read[b].x[0], keys_across(16 * b), kType);
        }
        wgmma_commit();
        if (!params_.only_starts) {
            store_residuals(c, w);
#pragma unroll
            for (int n = 0; n < 8; ++n) scale_columns(w[n], s.beta, 8 * n);
            if (call_.d_v) {
                const int v = 16 * warp();
                const std::int64_t at = call_.d_v.offset(span_.batch, token(c), head_) + v0_ + v;
                store_turned<Op>(call_.d_v, at, tokens_of(c), p_.dim_v - v0_ - v, s.values, v, w);
            }
        }
        wgmma_wait<0>();
    }

    // NOTE: while products read the same registers, which hides the stores.
    __device__ __forceinline__ void store_adjoint(std::int32_t c,
                                                  const Fragment<TwoParts<Op>> (&adjoint)[kK / 16]) const {
        const int rows = padded_columns(p_.dim_v);
        const BlockedRows<Op, kK> lines(static_cast<Element*>(params_.adjoints) + number(c) * rows * kK,
                                        v0_ + 16 * warp(), 0);
#pragma unroll
        for (int k = 0; k < kK / 16; ++k)
#pragma unroll
            for (int block = 0; block < 4; ++block) {
                lines.set(block % 2, 2 * k + block / 2, Pair<Op>{{adjoint[k].x[0][block]}});
            }
    }
    __device__ __forceinline__ void store_residuals(std::int32_t c, const float (&w)[8][4]) const {
        const int rows = padded_columns(p_.dim_v);
        const BlockedRows<Op, kChunk> lines(static_cast<Element*>(params_.residuals) + number(c) * rows * kChunk,
                                            v0_ + 16 * warp(), 0);
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                lines.set(half, n, Pair<Op>::of(w[n][2 * half], w[n][2 * half + 1]));
            }
    }

    const AdjointParams& params_;
    const BackwardCall& call_;
    const Problem& p_;
    AdjointShared<Config>& shared_;
    const Segment segment_;
    const std::int64_t segment_state_;  // first element of its states
    const std::int32_t head_;
    const int v0_;
    const Span span_;
    StateRows<kK> adjoint_;
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) adjoint_kernel(const __grid_constant__ AdjointParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    wait_for_earlier_grids();
    const auto heads = static_cast<std::uint32_t>(params.call.problem.heads_v);
    const std::uint32_t tile = blockIdx.x % params.tiles, row = blockIdx.x / params.tiles;
    const Segment segment = segment_of(params.call, params.table, row / heads);
    if (segment.n < 0) return;
    AdjointWalk<Config>(params, aligned_shared_block<AdjointShared<Config>>(), segment, row / heads,
                        static_cast<std::int32_t>(row % heads), static_cast<int>(tile))
        .run();
#endif
}

}  // namespace flashqla::cuda::sm90
