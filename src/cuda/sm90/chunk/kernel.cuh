// One block takes some columns of one value head's state through the chunks of a segment, with the products of
// src/cuda/sm80/chunk/kernel.cuh on Hopper's matrix units. A warpgroup has 64 columns of V as 64 rows of S^T in its
// registers; every product's A operand comes from registers, B from shared memory, where another warpgroup loads
// chunks ahead:
//
//   U^T = S^T K^T, O^T = S^T Q^T   [64,C]
//   R^T = beta V^T - read U^T      two parts
//   X^T = R^T T^T                  [64,C]
//   O^T = query O^T + X^T P^T
//   S^T = total S^T + (keep X)^T K
//
// Columns of V do not depend on each other: the computing warpgroups never wait for each other.
#pragma once

#include <type_traits>

#include "cuda/device/grid_order.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/state_walk.cuh"
#include "cuda/device/swizzled_output.cuh"
#include "cuda/device/tail.cuh"
#include "cuda/device/token_columns.cuh"
#include "cuda/sm90/chunk/config.cuh"

namespace flashqla::cuda::sm90 {

// The warpgroup that loads.
template <class Config, ChunkMode kMode>
class ChunkLoader {
    using Op = typename Config::Op;
    using Input = typename Op::Input;
    using Stage = typename ChunkShared<Config>::Stage;
    using Record = typename Config::Record;
    static constexpr int kChunk = Config::kChunk, kThreads = Config::kLoaders;
    static constexpr bool kOutputs = kMode == ChunkMode::outputs;

public:
    __device__ __forceinline__ ChunkLoader(const ChunkParams& params, ChunkShared<Config>& shared, int tokens)
        : call_(params.call),
          shared_(shared),
          chunks_(shared.place.segment.chunks),
          transition_(shared.place.transition),
          keys_(params.call.problem.dim_k),
          values_(params.call.problem.dim_v - shared.place.v0),
          tokens_(tokens) {
        const Span span = shared.place.span;
        const Segment segment = shared.place.segment;
        const std::int32_t head = shared.place.head, v0 = shared.place.v0;
        const std::int64_t t = span.begin + segment.first_token;
        const std::int32_t key = call_.key_head(head);
        const auto rows_of = [&](const TokenRef& x, std::int32_t of_head, int skip, int columns) {
            const auto* data = static_cast<const Input*>(x.data) + x.offset(span.batch, t, of_head) + skip;
            return GlobalRows<Input>{data, x.token, 0, columns};
        };
        k_ = decltype(k_)(rows_of(call_.k, key, 0, keys_));
        if (!transition_) v_ = decltype(v_)(rows_of(call_.v, head, v0, values_));
        if constexpr (kOutputs) q_ = decltype(q_)(rows_of(call_.q, key, 0, keys_));
        record_ = static_cast<const Record*>(params.from) + segment.first_chunk * call_.problem.heads_v + head;
    }

    __device__ __forceinline__ void run() {
        const bool copied = k_.copies() && (!kOutputs || q_.copies()) && (transition_ || v_.copies());
        RingPlace<Config::kStages> place;
#pragma unroll 1
        for (std::int32_t c = 0; c < chunks_; ++c) {
            shared_.empty[place.stage].wait(place.round ^ 1);
            load(shared_.stages[place.stage], shared_.full[place.stage]);
            hand_over(shared_.full[place.stage], copied);
            place.next();
        }
    }

private:
    __device__ __forceinline__ void load(Stage& to, Barrier& full) {
        if (threadIdx.x % kThreads < 32) {
            to.template load<kOutputs>(*record_, full);
            record_ += call_.problem.heads_v;
        }
        const int tokens = tokens_ < kChunk ? tokens_ : kChunk;
        tokens_ -= kChunk;
        k_.next(to.k, call_.k.token, tokens, keys_);
        if constexpr (kOutputs) q_.next(to.q, call_.q.token, tokens, keys_);
        if (!transition_) v_.next(to.values, call_.v.token, tokens, values_);
    }

    const ForwardCall& call_;
    ChunkShared<Config>& shared_;
    const std::int32_t chunks_;
    const bool transition_;
    const int keys_, values_;
    int tokens_;  // left to load
    const Record* record_;
    RowWalk<kThreads, decltype(Stage::k)> k_, q_;
    RowWalk<kThreads, decltype(Stage::values)> v_;
};

// fp16's units: see StateWalk. What the backward pass gets are the numbers themselves.
template <class Config, ChunkMode kMode>
inline constexpr bool kChunkScaled = std::is_same_v<typename Config::Op::Element, __half>&& kMode != ChunkMode::history;

// A warpgroup that computes.
template <class Config, ChunkMode kMode>
class ChunkWalk : public StateWalk<Config::kK, Config::kColumns, kMode, kChunkScaled<Config, kMode>, true> {
    using Base = StateWalk<Config::kK, Config::kColumns, kMode, kChunkScaled<Config, kMode>, true>;
    using Op = typename Config::Op;
    using Element = typename Op::Element;
    using Stage = typename ChunkShared<Config>::Stage;
    using Exact = TwoParts<Op>;
    static constexpr int kChunk = Config::kChunk, kBlocks = Config::kBlocks, kK = Config::kK;
    static constexpr bool kOutputs = Base::kOutputs, kScaled = kChunkScaled<Config, kMode>;
    using Base::at_;
    using Base::call_;
    using Base::p_;
    using Base::params_;
    using Base::state_;

public:
    __device__ __forceinline__ ChunkWalk(const ChunkParams& params, ChunkShared<Config>& shared)
        : Base(params, shared.place), shared_(shared) {}

    // A block's way from its beginning on.
    __device__ __forceinline__ void run(const Segment& segment, std::int64_t number, std::int32_t head, int tile) {
        const StatePlace place = Base::place_of(params_, segment, number, head, tile);
        if (threadIdx.x == 0) shared_.place = place;
        if (!Base::walks(place)) {
            __syncthreads();
            if (kOutputs && threadIdx.x < Config::kConsumers) Base::run_padding();
            return;
        }
        shared_.template open<kOutputs>();
        shared_.share_out([&] { ChunkLoader<Config, kMode>(params_, shared_, Base::tokens()).run(); }, [&] { walk(); });
    }

private:
    static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x / 32); }
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
    // The lane's columns of an accumulator: this one and the next of each 8.
    static __device__ __forceinline__ int column() { return 2 * (lane() % 4); }

    __device__ __forceinline__ void walk() {
        Base::start();
        tokens_ = Base::tokens();
        transition_ = at_.transition;
        auto t = static_cast<std::int32_t>(at_.segment.first_token);
        if constexpr (kOutputs) o_at_ = call_.o.offset(at_.span.batch, at_.span.begin + t, at_.head) + at_.v0;
        chunk_ = at_.segment.first_chunk * p_.heads_v + at_.head;
        RingPlace<Config::kStages> place;
#pragma unroll 1
        for (std::int32_t c = at_.segment.chunks; c > 0; --c, t += kChunk) {
            if constexpr (kOutputs) Base::keep_checkpoint(t);
            shared_.full[place.stage].wait(place.round);
            fence_for_wgmma();
            step(shared_.stages[place.stage]);
            __syncwarp();
            if (lane() == 0) shared_.empty[place.stage].arrive();
            place.next();
            chunk_ += p_.heads_v;
        }
        if constexpr (kOutputs) {
            if (at_.segment.last) Base::keep_checkpoint(static_cast<std::int32_t>(at_.span.length));
        }
        Base::finish();
    }

    __device__ __forceinline__ void step(Stage& s) {
        if constexpr (kScaled) Base::keep_in_range();
        constexpr Element kType{};
        const auto keys = s.k.along_k(), queries = s.q.along_k();
        const auto keys_across = s.k.across_k();
        const auto inverse = s.inverse.operand();
        const auto attention = s.attention.operand();
        float u[8][4], x[8][4], o[8][4];

        Fragment<Op> state[kK / 16];
#pragma unroll
        for (int k = 0; k < kK / 16; ++k) state[k] = state_.template operand<Op>(k);
        wgmma_fence();
        wgmma<false, Rows::along_k>(u, state[0].x[0], keys(0), kType);
#pragma unroll
        for (int k = 1; k < kK / 16; ++k) wgmma<true, Rows::along_k>(u, state[k].x[0], keys(16 * k), kType);
        wgmma_commit();
        if constexpr (kOutputs) {
            wgmma<false, Rows::along_k>(o, state[0].x[0], queries(0), kType);
#pragma unroll
            for (int k = 1; k < kK / 16; ++k) wgmma<true, Rows::along_k>(o, state[k].x[0], queries(16 * k), kType);
            wgmma_commit();
        }

        if constexpr (kMode == ChunkMode::history) store_history(state);

        // R^T, 16 tokens a fragment. T may take differences of residuals that are nearly equal: with one part, rounding
        // them would be the largest error of all.
        Fragment<Op> values[kBlocks];
        if (!transition_) {
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) values[b] = s.values.a_transposed(16 * b, 16 * warp());
        } else {
#pragma unroll
            for (int b = 0; b < kBlocks; ++b)
#pragma unroll
                for (int i = 0; i < 4; ++i) values[b].x[0][i] = 0;
        }
        wgmma_wait<kOutputs ? 1 : 0>();
        Fragment<Exact> residual[kBlocks];
#pragma unroll
        for (int n = 0; n < 2 * kBlocks; ++n) {
            const float2 beta = pair_of(s.beta, 8 * n + column()), read = pair_of(s.read, 8 * n + column());
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float2 value = values[n / 2].pair(2 * (n % 2) + half).value();
                if constexpr (kScaled) value.x *= this->inverse_unit_, value.y *= this->inverse_unit_;
                const float* reads = &u[n][2 * half];
                const float first = fmaf(-read.x, reads[0], beta.x * value.x);
                const float second = fmaf(-read.y, reads[1], beta.y * value.y);
                residual[n / 2].set(2 * (n % 2) + half, Pair<Exact>::of(first, second));
            }
        }

        wgmma_fence();
        wgmma_in_two_parts<Rows::along_k, Op>(x, residual, inverse);
        wgmma_commit();
        // What does not need X, meanwhile.
        state_.scale(s.total[0]);
        wgmma_wait<0>();

        Fragment<Op> deltas[kBlocks], kept[kBlocks];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            deltas[b] = Fragment<Op>::of(x[2 * b], x[2 * b + 1]);
            if constexpr (kMode == ChunkMode::history) store_deltas(b, deltas[b]);
#pragma unroll
            for (int n = 2 * b; n < 2 * b + 2; ++n) {
                scale_columns(x[n], s.keep, 8 * n);
                if constexpr (kOutputs) scale_columns(o[n], s.query, 8 * n);
            }
            kept[b] = Fragment<Op>::of(x[2 * b], x[2 * b + 1]);
        }
        wgmma_fence();
        if constexpr (kOutputs) {
#pragma unroll
            for (int j = 0; j < kBlocks; ++j) {
                wgmma<true, Rows::along_k>(o, deltas[j].x[0], attention(0, j), kType);
            }
            wgmma_commit();
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            wgmma<true, Rows::across_k>(state_.s, kept[b].x[0], keys_across(16 * b), kType);
        }
        wgmma_commit();
        if constexpr (kOutputs) {
            wgmma_wait<1>();
            store_outputs(s, o);
        }
        wgmma_wait<0>();
    }

    // ------------------------------------------------------------------------------------------------ what leaves

    // O^T to o. 16-bit rows are turned in the place of this warp's values and leave in 16-byte stores.
    __device__ __forceinline__ void store_outputs(Stage& s, float (&o)[8][4]) {
        const int v = 16 * warp(), tokens = tokens_;
        tokens_ -= kChunk;
        if constexpr (kScaled) {
#pragma unroll
            for (int n = 0; n < 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[n][e] *= this->unit_;
        }
        store_turned<Op>(call_.o, o_at_ + v, tokens, p_.dim_v - at_.v0 - v, s.values, v, o);
        o_at_ += kChunk * call_.o.token;
    }

    // NOTE: while products read the same registers, which hides the stores.
    __device__ __forceinline__ void store_history(const Fragment<Op> (&state)[kK / 16]) const {
        const int rows = padded_columns(p_.dim_v);
        const BlockedRows<Op, kK> lines(static_cast<Element*>(params_.history) + chunk_ * rows * kK,
                                        at_.v0 + 16 * warp(), 0);
#pragma unroll
        for (int k = 0; k < kK / 16; ++k) lines.set_fragment(k, state[k]);
    }
    __device__ __forceinline__ void store_deltas(int b, const Fragment<Op>& x) {
        const int rows = padded_columns(p_.dim_v);
        auto* to = static_cast<Element*>(params_.deltas) + chunk_ * rows * kChunk;
        BlockedRows<Op, kChunk>(to, at_.v0 + 16 * warp(), 0).set_fragment(b, x);
    }

    ChunkShared<Config>& shared_;
    std::int64_t o_at_ = 0;   // of the next chunk to store
    std::int64_t chunk_ = 0;  // of the head and the next chunk in the workspace
    int tokens_ = 0;          // left to store
    bool transition_ = false;
};

template <class Config, ChunkMode kMode>
__global__ void __launch_bounds__(Config::kThreads, 1) chunk_kernel(const __grid_constant__ ChunkParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    wait_for_earlier_grids();
    if (blockIdx.x >= params.segment_blocks) {
        return zero_tail(params.call, params.call.o, params.call.problem.heads_v, params.call.problem.dim_v,
                         blockIdx.x - params.segment_blocks, params.zero_blocks);
    }
    const auto heads = static_cast<std::uint32_t>(params.call.problem.heads_v);
    const std::uint32_t tile = blockIdx.x % params.tiles, row = blockIdx.x / params.tiles;
    const std::int64_t number = row / heads;
    const Segment segment = segment_of(params.call, params.table, number);
    if (segment.n < 0) return;
    ChunkWalk<Config, kMode>(params, aligned_shared_block<ChunkShared<Config>>())
        .run(segment, number, static_cast<std::int32_t>(row % heads), static_cast<int>(tile));
#endif
}

}  // namespace flashqla::cuda::sm90
