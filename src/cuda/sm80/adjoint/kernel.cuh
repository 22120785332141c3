// One block takes 64 columns of the gradient of one value head's state back through the chunks of a segment, from the
// last chunk to the first. The mirror image of the forward walk, transposed like it, so that D and each product's
// result are the next product's A operand without leaving the registers:
//
//   X'^T = keep (D^T K^T) + dO^T P        [V,C]   B operands: rows of k, the two triangles, k and q again
//   W'^T = X'^T T                         [V,C]
//   dV^T = beta W'^T
//   D^T  = total D^T - (read W'^T) K + (query dO^T) Q
//
// Each chunk's D and W' stay in the workspace for the gradients of the other inputs, which need no order of chunks.
#pragma once

#include "cuda/device/chunks.cuh"
#include "cuda/device/grid_order.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/state_rows.cuh"
#include "cuda/device/token_columns.cuh"
#include "cuda/device/turned.cuh"
#include "cuda/sm80/adjoint/config.cuh"

namespace flashqla::cuda::sm80 {

template <class Config>
class AdjointWalk {
    using Op = typename Config::Op;
    using Element = typename Op::Element;
    using Stage = AdjointStage<Config>;
    static constexpr int kChunk = Config::kChunk, kBlocks = Config::kBlocks, kK = Config::kK;
    static constexpr int kSplit = Config::kSplit, kKeys = Config::kKeys;

public:
    __device__ __forceinline__ AdjointWalk(const AdjointParams& params, Stage* stages, const Segment& segment,
                                           std::int64_t segment_number, std::int32_t head, int tile)
        : params_(params),
          call_(params.call),
          p_(params.call.problem),
          stages_(stages),
          segment_(segment),
          segment_state_((segment_number * p_.heads_v + head) * p_.dim_v * p_.dim_k),
          head_(head),
          key_head_(params.call.key_head(head)),
          v0_(tile * Config::kColumns),
          state_v0_(v0_ - part() * Config::kColumns),
          span_(clamped_span(params.call, segment.n)) {}

    __device__ __forceinline__ void run() {
        if (params_.only_starts && segment_.index == 0) return;
        // The chunks that fit into shared memory, then each in the place of the one that is done.
        const std::int32_t stages = params_.stages;
#pragma unroll 1
        for (std::int32_t c = segment_.chunks - 1; c >= 0 && c >= segment_.chunks - stages; --c) load(c);
        if (!segment_.last && !params_.only_starts) {
            adjoint_.load_rows(params_.segments.ends + segment_state_, state_v0_, p_.dim_v, p_.dim_k, first_key());
        } else if (segment_.last && call_.d_final_state) {
            adjoint_.load(call_.d_final_state, p_, segment_.n, head_, state_v0_, first_key());
        } else {
            adjoint_.zero();
        }
#pragma unroll 1
        for (std::int32_t c = segment_.chunks - 1; c >= 0; --c) {
            if (stages == 2 && c > 0) {
                copies_wait<1>();
            } else {
                copies_wait<0>();
            }
            __syncthreads();
            step(c, stage(c));
            __syncthreads();
            if (c >= stages) load(c - stages);
        }
        if (params_.only_starts) {
            adjoint_.store_rows(params_.segments.starts + segment_state_, state_v0_, p_.dim_v, p_.dim_k, first_key());
        } else if (segment_.index == 0 && call_.d_initial_state) {
            adjoint_.store(call_.d_initial_state, p_, segment_.n, head_, state_v0_, first_key());
        }
    }

private:
    static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x / 32); }
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
    // The warp's keys and its columns of V within the block.
    static __device__ __forceinline__ int part() { return kSplit > 1 ? warp() / Config::kLines : 0; }
    static __device__ __forceinline__ int first_key() { return part() * kKeys; }
    static __device__ __forceinline__ int first_column() { return 16 * (warp() % Config::kLines); }
    // The lane's columns of an accumulator: this one and the next of each 8.
    static __device__ __forceinline__ int column() { return 2 * (lane() % 4); }

    __device__ __forceinline__ Stage& stage(std::int32_t chunk) const {
        return stages_[params_.stages == 2 ? chunk % 2 : 0];
    }
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

    __device__ __forceinline__ void load(std::int32_t c) {
        constexpr int kThreads = Config::kThreads;
        Stage& to = stage(c);
        const auto rows_of = [&](const TokenRef& x, std::int32_t head, int skip, int columns) {
            return TokenRows::of(x, span_.batch, token(c), head, skip, tokens_of(c), columns);
        };
        fill_tokens<kThreads>(to.k, rows_of(call_.k, key_head_, 0, p_.dim_k));
        fill_tokens<kThreads>(to.d_o, rows_of(call_.d_o, head_, v0_, p_.dim_v - v0_));
        fill_tokens<kThreads>(to.q, rows_of(call_.q, key_head_, 0, p_.dim_k));
        using Record = PreparedChunk<Element, Op::kParts, kChunk>;
        copy_record<kThreads, sizeof(to.prepared)>(&to.prepared,
                                                   static_cast<const Record*>(params_.prepared) + number(c));
        copies_commit();
    }

    __device__ __forceinline__ void step(std::int32_t c, Stage& s) {
        const int padded = padded_columns(p_.dim_v), v = first_column();
        const bool keep = !params_.only_starts;
        if (keep) {
            const BlockedRows<Op, kK> lines(
                static_cast<Element*>(params_.adjoints) + number(c) * Op::kParts * padded * kK, v0_ + v,
                std::int64_t(padded) * kK);
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    lines.set(half, first_key() / 8 + n,
                              Pair<Op>::of(adjoint_.s[n][2 * half], adjoint_.s[n][2 * half + 1]));
                }
        }

        // The system of the deltas takes from D what lies along the keys, which leaves a difference: D takes part with
        // what its rounding takes away.
        float y[2 * kBlocks][4] = {};
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k) {
            const Fragment<Op> adjoint = adjoint_.template operand<Op>(k);
            const Fragment<Op> rest = rest_of(adjoint_.s[2 * k], adjoint_.s[2 * k + 1], adjoint);
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
                const Fragment<Op> keys = s.k.b_transposed(16 * b, first_key() + 16 * k);
                multiply(y[2 * b], y[2 * b + 1], adjoint, keys);
                if constexpr (Op::kParts == 1) multiply(y[2 * b], y[2 * b + 1], rest, keys);
            }
        }

        Fragment<Op> d_o[kBlocks];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) d_o[b] = s.d_o.a_transposed(16 * b, v);
        if constexpr (kSplit > 1) add_other_keys(y);

            // X'^T, 16 tokens a fragment: what outputs of this token and later ones read is added to what the state
            // kept.
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            scale_columns(y[2 * b], s.prepared.keep, 16 * b);
            scale_columns(y[2 * b + 1], s.prepared.keep, 16 * b + 8);
        }
#pragma unroll
        for (int i = 0; i < kBlocks; ++i)
#pragma unroll
            for (int b = 0; b <= i; ++b) multiply(y[2 * b], y[2 * b + 1], d_o[i], s.prepared.attention.b(i, b));

        // W'^T. X' is summed over tokens with either sign: its first rounding error would be what is left of sums that
        // cancel, so it has two parts, as T has.
        float w[2 * kBlocks][4] = {};
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
            const auto x = Fragment<TwoParts<Op>>::of(y[2 * j], y[2 * j + 1]);
#pragma unroll
            for (int b = 0; b <= j; ++b) multiply(w[2 * b], w[2 * b + 1], x, s.prepared.inverse.b(j, b));
        }

        const BlockedRows<Op, kChunk> residuals(
            static_cast<Element*>(params_.residuals) + number(c) * Op::kParts * padded * kChunk, v0_ + v,
            std::int64_t(padded) * kChunk);
        Fragment<Op> read[kBlocks];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
            for (int n = 2 * b; n < 2 * b + 2; ++n) {
                if (keep && b * kSplit / kBlocks == part()) {
                    residuals.set(0, n, Pair<Op>::of(w[n][0], w[n][1]));
                    residuals.set(1, n, Pair<Op>::of(w[n][2], w[n][3]));
                }
#pragma unroll
                for (int e = 0; e < 4; ++e) y[n][e] = w[n][e];
                scale_columns(y[n], s.prepared.beta, 8 * n);
                scale_columns(w[n], s.prepared.read, 8 * n);
#pragma unroll
                for (int e = 0; e < 4; ++e) w[n][e] = -w[n][e];
            }
            read[b] = Fragment<Op>::of(w[2 * b], w[2 * b + 1]);
        }
        if (keep && call_.d_v) {
#pragma unroll
            for (int share = 0; share < kSplit; ++share) {
                if (share == part()) store_values<kBlocks / kSplit>(c, s, share, y);
            }
        }

        adjoint_.scale(s.prepared.total[0]);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
            for (int k = 0; k < kKeys / 16; ++k) {
                multiply(adjoint_.s[2 * k], adjoint_.s[2 * k + 1], read[b], s.k.b(16 * b, first_key() + 16 * k));
            }
            const Fragment<Op> out = scaled(d_o[b], s.prepared.query, 16 * b);
#pragma unroll
            for (int k = 0; k < kKeys / 16; ++k) {
                multiply(adjoint_.s[2 * k], adjoint_.s[2 * k + 1], out, s.q.b(16 * b, first_key() + 16 * k));
            }
        }
    }

    // D^T K^T over all keys, in each of the two warps.
    __device__ __forceinline__ void add_other_keys(float (&y)[2 * kBlocks][4]) const {
        auto& exchange = *reinterpret_cast<AdjointExchange<Config>*>(stages_ + params_.stages);
#pragma unroll
        for (int n = 0; n < 2 * kBlocks; ++n) {
            exchange.sums[warp()][n][lane()] = {y[n][0], y[n][1], y[n][2], y[n][3]};
        }
        __syncthreads();
        const int other = (warp() + Config::kLines) % Config::kWarps;
#pragma unroll
        for (int n = 0; n < 2 * kBlocks; ++n) {
            const float4 four = exchange.sums[other][n][lane()];
            y[n][0] += four.x, y[n][1] += four.y, y[n][2] += four.z, y[n][3] += four.w;
        }
    }

    // The share of d_v that this warp of the two writes.
    template <int kShare>
    __device__ __forceinline__ void store_values(std::int32_t c, Stage& s, int share,
                                                 const float (&all)[2 * kBlocks][4]) const {
        const int first = 16 * kShare * share, v = first_column();
        TurnedRows<kShare> x;
#pragma unroll
        for (int n = 0; n < 2 * kShare; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[n][e] = all[2 * kShare * share + n][e];
        const std::int64_t at = call_.d_v.offset(span_.batch, token(c) + first, head_) + v0_ + v;
        store_turned<Op, kShare>(call_.d_v, at, tokens_of(c) - first, p_.dim_v - v0_ - v, s.d_o, first, v, x);
    }

    // What rounding has taken from two accumulators.
    static __device__ __forceinline__ Fragment<Op> rest_of(const float (&left)[4], const float (&right)[4],
                                                           const Fragment<Op>& rounded) {
        Fragment<Op> rest;
#pragma unroll
        for (int block = 0; block < 4; ++block) {
            const float* x = (block < 2 ? left : right) + block % 2 * 2;
            const float2 taken = rounded.pair(block).value();
            rest.set(block, Pair<Op>::of(x[0] - taken.x, x[1] - taken.y));
        }
        return rest;
    }

    const AdjointParams& params_;
    const BackwardCall& call_;
    const Problem& p_;
    Stage* const stages_;
    const Segment segment_;
    const std::int64_t segment_state_;  // first element of its states
    const std::int32_t head_, key_head_;
    const int v0_;
    const int state_v0_;  // so that rows of warps of the second part count from v0 as well
    const Span span_;
    StateRows<kKeys> adjoint_;
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    adjoint_kernel(const __grid_constant__ AdjointParams params) {
    wait_for_earlier_grids();
    const auto heads = static_cast<std::uint32_t>(params.call.problem.heads_v);
    const std::uint32_t tile = blockIdx.x % params.tiles, row = blockIdx.x / params.tiles;
    const Segment segment = segment_of(params.call, params.table, row / heads);
    if (segment.n < 0) return;
    AdjointWalk<Config>(params, &shared_block<AdjointStage<Config>>(), segment, row / heads,
                        static_cast<std::int32_t>(row % heads), static_cast<int>(tile))
        .run();
}

}  // namespace flashqla::cuda::sm80
