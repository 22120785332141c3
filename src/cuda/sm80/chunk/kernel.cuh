// One block takes some columns of one value head's state through the chunks of a segment. Everything is transposed, so
// that the state and each product's result are the next product's A operand without leaving the registers:
//
//   U^T = S^T K^T            [V,C]   B operands: rows of k, q, the two triangles, k again
//   R^T = beta V^T - read U^T
//   X^T = R^T T^T            [V,C]
//   O^T = query (S^T Q^T) + X^T P^T
//   S^T = total S^T + (keep X)^T K
//
// Columns of V do not depend on each other: warps meet only to share the loads.
#pragma once

#include <type_traits>

#include "cuda/device/chunks.cuh"
#include "cuda/device/grid_order.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/state_walk.cuh"
#include "cuda/device/tail.cuh"
#include "cuda/device/token_columns.cuh"
#include "cuda/sm80/chunk/config.cuh"

namespace flashqla::cuda::sm80 {

// O^T of a warp to o, for what 16-byte stores cannot do.
template <int kTiles>
__device__ __noinline__ void store_by_element(TokenRef o, std::int64_t at, int tokens, int columns,
                                              const float (&x)[kTiles][4]) {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = 8 * n + lane % 4 * 2 + e % 2, v = lane / 4 + e / 2 * 8;
            if (row < tokens && v < columns) store_element(o.data, o.dtype, at + row * o.token + v, x[n][e]);
        }
}

template <class Config, ChunkMode kMode>
inline constexpr bool kChunkScaled = std::is_same_v<typename Config::Op::Element, __half>&& kMode != ChunkMode::history;

template <class Config, ChunkMode kMode>
class ChunkWalk : StateWalk<Config::kK, Config::kColumns, kMode, kChunkScaled<Config, kMode>, false> {
    using Base = StateWalk<Config::kK, Config::kColumns, kMode, kChunkScaled<Config, kMode>, false>;
    using Op = typename Config::Op;
    using Stage = ChunkStage<Config>;
    using Record = PreparedChunk<typename Op::Element, Op::kParts, Config::kChunk>;
    static constexpr int kChunk = Config::kChunk, kBlocks = Config::kBlocks, kK = Config::kK;
    static constexpr bool kOutputs = Base::kOutputs;
    // What the backward pass gets are the numbers themselves.
    static constexpr bool kScaled = kChunkScaled<Config, kMode>;
    using Base::at_;
    using Base::call_;
    using Base::p_;
    using Base::params_;
    using Base::state_;

public:
    __device__ __forceinline__ ChunkWalk(const ChunkParams& params, Stage* stages, const Segment& segment,
                                         std::int64_t number, std::int32_t head, int tile)
        : Base(params, Base::place_of(params, segment, number, head, tile)), stages_(stages) {}

    __device__ __forceinline__ void run() {
        if (!Base::walks(at_)) {
            if constexpr (kOutputs) Base::run_padding();
            return;
        }
        point();
        if (at_.segment.chunks > 0) load(stages_[0]);
        Base::start();
        walk();
        if constexpr (kOutputs) {
            if (at_.segment.last) Base::keep_checkpoint(static_cast<std::int32_t>(at_.span.length));
        }
        Base::finish();
    }

private:
    static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x / 32); }
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
    // The lane's columns of an accumulator: this one and the next of each 8.
    static __device__ __forceinline__ int column() { return 2 * (lane() % 4); }

    // ------------------------------------------------------------------------------------------------- the walk

    __device__ __forceinline__ void walk() {
        const bool ahead = params_.stages == 2;
        auto t = static_cast<std::int32_t>(at_.segment.first_token);
        for (std::int32_t c = 0; c < at_.segment.chunks; ++c, t += kChunk) {
            Stage& now = stages_[ahead ? c % 2 : 0];
            if (ahead && c + 1 < at_.segment.chunks) {
                load(stages_[(c + 1) % 2]);
                copies_wait<1>();
            } else {
                copies_wait<0>();
            }
            __syncthreads();
            if constexpr (kOutputs) Base::keep_checkpoint(t);
            if constexpr (kMode == ChunkMode::history) store_history(c);
            step(c, now);
            __syncthreads();
            if (!ahead && c + 1 < at_.segment.chunks) load(now);
        }
    }

    // Points the walks at the segment's first chunk.
    __device__ __forceinline__ void point() {
        using Input = typename Op::Input;
        const std::int64_t t = at_.span.begin + at_.segment.first_token,
                           left = at_.span.length - at_.segment.first_token;
        const std::int64_t inside = std::int64_t(at_.segment.chunks) * kChunk;
        to_load_ = to_store_ = static_cast<int>(left < inside ? left : inside);
        const std::int32_t key = call_.key_head(at_.head);
        const auto rows_of = [&](const TokenRef& x, std::int32_t head, int skip, int columns) {
            const auto* data = static_cast<const Input*>(x.data) + x.offset(at_.span.batch, t, head) + skip;
            return GlobalRows<Input>{data, x.token, 0, columns};
        };
        k_ = decltype(k_)(rows_of(call_.k, key, 0, p_.dim_k));
        if (!at_.transition) v_ = decltype(v_)(rows_of(call_.v, at_.head, at_.v0, p_.dim_v - at_.v0));
        if constexpr (kOutputs) {
            q_ = decltype(q_)(rows_of(call_.q, key, 0, p_.dim_k));
            o_at_ = call_.o.offset(at_.span.batch, t, at_.head) + at_.v0;
        }
        record_ = at_.segment.first_chunk * p_.heads_v + at_.head;
    }

    // Asks for the next chunk.
    __device__ __forceinline__ void load(Stage& to) {
        const int tokens = to_load_ < kChunk ? to_load_ : kChunk;
        to_load_ -= kChunk;
        k_.next(to.k, call_.k.token, tokens, p_.dim_k);
        if (!at_.transition) v_.next(to.v, call_.v.token, tokens, p_.dim_v - at_.v0);
        if constexpr (kOutputs) q_.next(to.q, call_.q.token, tokens, p_.dim_k);
        constexpr int kBytes = kOutputs ? Stage::kWithAttention : Stage::kWithoutAttention;
        copy_record<Config::kThreads, kBytes>(&to.prepared, static_cast<const Record*>(params_.from) + record_);
        record_ += p_.heads_v;
        copies_commit();
    }

    __device__ __forceinline__ void store_history(std::int32_t c) const {
        using Element = typename Op::Element;
        const int rows = padded_columns(p_.dim_v);
        const std::int64_t at = (at_.segment.first_chunk + c) * p_.heads_v + at_.head;
        state_.template store_operands<Op>(static_cast<Element*>(params_.history) + at * Op::kParts * rows * kK, at_.v0,
                                           rows);
    }

    __device__ __forceinline__ void store_deltas(std::int32_t c, int b, const Fragment<Op>& x) const {
        const int rows = padded_columns(p_.dim_v);
        const std::int64_t at = (at_.segment.first_chunk + c) * p_.heads_v + at_.head;
        auto* to = static_cast<typename Op::Element*>(params_.deltas) + at * Op::kParts * rows * kChunk;
        const BlockedRows<Op, kChunk> lines(to, at_.v0 + 16 * warp(), std::int64_t(rows) * kChunk);
#pragma unroll
        for (int block = 0; block < 4; ++block) lines.set(block % 2, 2 * b + block / 2, x.pair(block));
    }

    __device__ __forceinline__ void step(std::int32_t c, Stage& s) {
        if constexpr (kScaled) Base::keep_in_range();
        float u[2 * kBlocks][4] = {}, o[kOutputs ? 2 * kBlocks : 1][4] = {};
        const auto& prepared = s.prepared;
        const int v = 16 * warp();
#pragma unroll
        for (int k = 0; k < kK / 16; ++k) {
            const Fragment<Op> state = state_.template operand<Op>(k);
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
                multiply(u[2 * b], u[2 * b + 1], state, s.k.b_transposed(16 * b, 16 * k));
                if constexpr (kOutputs) multiply(o[2 * b], o[2 * b + 1], state, s.q.b_transposed(16 * b, 16 * k));
            }
        }

        // R^T, 16 tokens a fragment. T may take differences of residuals that are nearly equal: with one part, rounding
        // them would be the largest error of all.
        using Exact = TwoParts<Op>;
        Fragment<Exact> residual[kBlocks];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            Fragment<Op> values;
            if (!at_.transition) values = s.v.a_transposed(16 * b, v);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const int t = 16 * b + 8 * n + column();
                const float2 beta = pair_of(prepared.beta, t), read = pair_of(prepared.read, t);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float2 value = {0.0f, 0.0f};
                    if (!at_.transition) value = values.pair(2 * n + half).value();
                    if constexpr (kScaled) value.x *= this->inverse_unit_, value.y *= this->inverse_unit_;
                    float* reads = &u[2 * b + n][2 * half];
                    const float first = fmaf(-read.x, reads[0], beta.x * value.x);
                    const float second = fmaf(-read.y, reads[1], beta.y * value.y);
                    residual[b].set(2 * n + half, Pair<Exact>::of(first, second));
                    reads[0] = reads[1] = 0.0f;
                }
                if constexpr (kOutputs) scale_columns(o[2 * b + n], prepared.query, 16 * b + 8 * n);
            }
        }

        // X^T, in the place of U^T.
        Fragment<Op> x[kBlocks], kept[kBlocks];
#pragma unroll
        for (int j = 0; j < kBlocks; ++j)
#pragma unroll
            for (int b = j; b < kBlocks; ++b) {
                multiply(u[2 * b], u[2 * b + 1], residual[j], prepared.inverse.b_transposed(b, j));
            }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            x[b] = Fragment<Op>::of(u[2 * b], u[2 * b + 1]);
            if constexpr (kMode == ChunkMode::history) store_deltas(c, b, x[b]);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                scale_columns(u[2 * b + n], prepared.keep, 16 * b + 8 * n);
            }
            kept[b] = Fragment<Op>::of(u[2 * b], u[2 * b + 1]);
        }

        if constexpr (kOutputs) {
#pragma unroll
            for (int j = 0; j < kBlocks; ++j)
#pragma unroll
                for (int b = j; b < kBlocks; ++b) {
                    multiply(o[2 * b], o[2 * b + 1], x[j], prepared.attention.b_transposed(b, j));
                }
        }
        state_.scale(prepared.total[0]);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int k = 0; k < kK / 16; ++k) {
                multiply(state_.s[2 * k], state_.s[2 * k + 1], kept[b], s.k.b(16 * b, 16 * k));
            }
        if constexpr (kOutputs) store_outputs(s, o);
    }

    // O^T to o. 16-bit rows are turned in the place of this warp's values and leave in 16-byte stores.
    __device__ __forceinline__ void store_outputs(Stage& s, float (&o)[2 * kBlocks][4]) {
        const int tokens = to_store_, v = 16 * warp(), columns = p_.dim_v - at_.v0 - v;
        const std::int64_t stride = only_here(call_.o.token);
        to_store_ -= kChunk;
        if constexpr (kScaled) {
#pragma unroll
            for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[n][e] *= this->unit_;
        }
        if constexpr (Op::kParts == 1) {
            using Element = typename Op::Element;
            Element* to = static_cast<Element*>(call_.o.data) + o_at_ + v;
            const bool vectors = call_.o.dtype != DType::f32 && columns >= 16 && stride % 8 == 0 &&
                                 reinterpret_cast<std::uintptr_t>(to) % 16 == 0;
            if (vectors) {
                __syncwarp();
#pragma unroll
                for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        Pair<Op> pair = Pair<Op>::of(o[n][2 * half], o[n][2 * half + 1]);
                        pair.part[0] = transpose_8x8(pair.part[0]);
                        s.v.set(8 * n + lane() / 4, v + 8 * half + column(), pair);
                    }
                __syncwarp();
                const int row = lane() / 2, skip = lane() % 2 * 8;
                to += row * stride + skip;
                const auto* from = s.v.x + row * s.v.kStride + v + skip;
#pragma unroll
                for (int i = 0; i < kChunk; i += 16, to += 16 * stride) {
                    const uint4 eight = *reinterpret_cast<const uint4*>(from + i * s.v.kStride);
                    if (row + i < tokens) *reinterpret_cast<uint4*>(to) = eight;
                }
                o_at_ += kChunk * stride;
                return;
            }
        }
        // NOTE: a copy, so that `o` itself never has an address and stays in registers.
        float copy[2 * kBlocks][4];
#pragma unroll
        for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) copy[n][e] = o[n][e];
        store_by_element<2 * kBlocks>(call_.o, o_at_ + v, tokens, columns, copy);
        o_at_ += kChunk * stride;
    }

    Stage* const stages_;
    RowWalk<Config::kThreads, decltype(Stage::k)> k_, q_;
    RowWalk<Config::kThreads, decltype(Stage::v)> v_;
    std::int64_t record_ = 0, o_at_ = 0;  // of the next chunk to load, of the next one to store
    int to_load_ = 0, to_store_ = 0;      // tokens left
};

template <class Config, ChunkMode kMode>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    chunk_kernel(const __grid_constant__ ChunkParams params) {
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
    ChunkWalk<Config, kMode>(params, &shared_block<ChunkStage<Config>>(), segment, number,
                             static_cast<std::int32_t>(row % heads), static_cast<int>(tile))
        .run();
}

}  // namespace flashqla::cuda::sm80
