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
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/tail.cuh"
#include "cuda/sm80/chunk/config.cuh"
#include "cuda/sm80/chunk/state.cuh"

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
class ChunkWalk {
    using Op = typename Config::Op;
    using Stage = ChunkStage<Config>;
    using Record = PreparedChunk<typename Op::Element, Op::kParts, Config::kChunk>;
    static constexpr int kChunk = Config::kChunk, kBlocks = Config::kBlocks, kK = Config::kK;
    static constexpr bool kOutputs = kMode == ChunkMode::outputs;
    using Cursor = BasicCheckpointCursor<false>;
    // fp16 ends at 65,504, a state does not: rows of S^T are kept in units of a power of two. What the backward pass
    // gets are the numbers themselves.
    static constexpr bool kScaled = std::is_same_v<typename Op::Element, __half> && kMode != ChunkMode::history;

public:
    __device__ __forceinline__ ChunkWalk(const ChunkParams& params, Stage* stages, const Segment& segment,
                                         std::int64_t number, std::int32_t head, int tile)
        : params_(params),
          call_(params.call),
          p_(params.call.problem),
          stages_(stages),
          segment_(segment),
          number_(number),
          head_(head),
          v0_(tile * Config::kColumns),
          span_(clamped_span(params.call, segment.n)),
          slots_(clamped_slots(params.call, segment.n)) {
        if constexpr (kMode == ChunkMode::ends) {
            const int value_tiles = (p_.dim_v + Config::kColumns - 1) / Config::kColumns;
            transition_ = tile >= value_tiles;
            if (transition_) v0_ = (tile - value_tiles) * Config::kColumns;
        }
    }

    __device__ __forceinline__ void run() {
        if constexpr (kMode == ChunkMode::ends) {
            if (segment_.last || slots_.padding || (transition_ && segment_.index == 0)) return;
        }
        if constexpr (kOutputs) {
            if (slots_.padding) return run_padding();
        }
        point();
        if (segment_.chunks > 0) load(stages_[0]);
        start();
        if constexpr (kOutputs) {
            Cursor cursor(call_, segment_.n, span_.length);
            cursor.skip(segment_.first_token);
            walk([&](std::int64_t t) { keep_checkpoints(cursor, t); });
            if (segment_.last) keep_checkpoints(cursor, span_.length);
            to_real_units();
            if (segment_.last && slots_.write >= 0) state_.store(call_.final_state, p_, slots_.write, head_, v0_);
        } else {
            walk([](std::int64_t) {});
            to_real_units();
            if constexpr (kMode == ChunkMode::ends) store_end();
        }
    }

private:
    static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x / 32); }
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
    // The lane's columns of an accumulator: this one and the next of each 8.
    static __device__ __forceinline__ int column() { return 2 * (lane() % 4); }

    // ------------------------------------------------------------------------------------------ start and end

    __device__ __forceinline__ void start() {
        const std::int64_t row = number_ * p_.heads_v + head_;
        if (segment_.index > 0) {
            if constexpr (kMode == ChunkMode::ends) {
                state_.zero();
                if (transition_) state_.identity(v0_);
            } else {
                state_.load_rows(params_.states.starts + row * p_.dim_v * p_.dim_k, v0_, p_.dim_v, p_.dim_k);
            }
        } else if (slots_.read >= 0) {
            state_.load(call_.initial_state, p_, slots_.read, head_, v0_);
        } else {
            state_.zero();
        }
    }

    __device__ __forceinline__ void store_end() {
        const std::int64_t row = number_ * p_.heads_v + head_;
        float* to = params_.states.ends + row * (p_.dim_v + p_.dim_k) * p_.dim_k;
        if (transition_) {
            state_.store_rows(to + std::int64_t(p_.dim_v) * p_.dim_k, v0_, p_.dim_k, p_.dim_k);
        } else {
            state_.store_rows(to, v0_, p_.dim_v, p_.dim_k);
        }
    }

    __device__ __forceinline__ void keep_checkpoints(Cursor& cursor, std::int64_t t) {
        if (t == cursor.next()) {
            to_real_units();
            cursor.visit([&](std::int64_t row) { state_.store(call_.checkpoints, p_, row, head_, v0_); });
        }
    }

    // A padding row: outputs and checkpoints are zero, no slot is touched.
    __device__ __forceinline__ void run_padding() {
        const std::int64_t end = segment_.first_token + std::int64_t(segment_.chunks) * kChunk;
        const std::int64_t tokens = (end < span_.length ? end : span_.length) - segment_.first_token;
        for (std::int64_t i = threadIdx.x; i < tokens * Config::kColumns; i += Config::kThreads) {
            const int v = v0_ + static_cast<int>(i % Config::kColumns);
            const std::int64_t t = span_.begin + segment_.first_token + i / Config::kColumns;
            if (v < p_.dim_v) {
                store_element(call_.o.data, call_.o.dtype, call_.o.offset(span_.batch, t, head_) + v, 0.0f);
            }
        }
        if (segment_.index > 0) return;
        state_.zero();
        Cursor cursor(call_, segment_.n, span_.length);
        while (cursor.next() >= 0) keep_checkpoints(cursor, cursor.next());
    }

    // ------------------------------------------------------------------------------------------------ fp16's range

    // Everything a chunk computes is linear in the rows of S^T and V^T, so each warp may choose its unit. It changes it
    // when its largest element is within a factor of 16 of the end of the range.
    __device__ __forceinline__ void keep_in_range() {
        constexpr float kLargest = 0x1p12f;
        float largest = state_.largest();
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, bit));
        }
        if (!(largest > kLargest) || isinf(largest)) return;
        int exponent;
        frexpf(largest, &exponent);
        const float down = ldexpf(1.0f, 8 - exponent);
        state_.scale(down);
        inverse_unit_ *= down;
        unit_ /= down;
    }
    __device__ __forceinline__ void to_real_units() {
        if constexpr (kScaled) {
            state_.scale(unit_);
            unit_ = inverse_unit_ = 1.0f;
        }
    }

    // ------------------------------------------------------------------------------------------------- the walk

    // Calls before_chunk(tokens done) with the state that enters each chunk.
    template <class F>
    __device__ __forceinline__ void walk(F&& before_chunk) {
        const bool ahead = params_.stages == 2;
        std::int64_t t = segment_.first_token;
        for (std::int32_t c = 0; c < segment_.chunks; ++c, t += kChunk) {
            Stage& now = stages_[ahead ? c % 2 : 0];
            if (ahead && c + 1 < segment_.chunks) {
                load(stages_[(c + 1) % 2]);
                copies_wait<1>();
            } else {
                copies_wait<0>();
            }
            __syncthreads();
            before_chunk(t);
            if constexpr (kMode == ChunkMode::history) {
                to_real_units();
                store_history(c);
            }
            step(c, now);
            __syncthreads();
            if (!ahead && c + 1 < segment_.chunks) load(now);
        }
    }

    // Points the walks at the segment's first chunk.
    __device__ __forceinline__ void point() {
        using Input = typename Op::Input;
        const std::int64_t t = span_.begin + segment_.first_token, left = span_.length - segment_.first_token;
        const std::int64_t inside = std::int64_t(segment_.chunks) * kChunk;
        to_load_ = to_store_ = static_cast<int>(left < inside ? left : inside);
        const std::int32_t key = call_.key_head(head_);
        const auto rows_of = [&](const TokenRef& x, std::int32_t head, int skip, int columns) {
            const auto* data = static_cast<const Input*>(x.data) + x.offset(span_.batch, t, head) + skip;
            return GlobalRows<Input>{data, x.token, 0, columns};
        };
        k_ = decltype(k_)(rows_of(call_.k, key, 0, p_.dim_k));
        if (!transition_) v_ = decltype(v_)(rows_of(call_.v, head_, v0_, p_.dim_v - v0_));
        if constexpr (kOutputs) {
            q_ = decltype(q_)(rows_of(call_.q, key, 0, p_.dim_k));
            o_at_ = call_.o.offset(span_.batch, t, head_) + v0_;
        }
        record_ = segment_.first_chunk * p_.heads_v + head_;
    }

    // Asks for the next chunk.
    __device__ __forceinline__ void load(Stage& to) {
        const int tokens = to_load_ < kChunk ? to_load_ : kChunk;
        to_load_ -= kChunk;
        k_.next(to.k, call_.k.token, tokens, p_.dim_k);
        if (!transition_) v_.next(to.v, call_.v.token, tokens, p_.dim_v - v0_);
        if constexpr (kOutputs) q_.next(to.q, call_.q.token, tokens, p_.dim_k);
        constexpr int kBytes = kOutputs ? Stage::kWithAttention : Stage::kWithoutAttention;
        copy_record<Config::kThreads, kBytes>(&to.prepared, static_cast<const Record*>(params_.from) + record_);
        record_ += p_.heads_v;
        copies_commit();
    }

    __device__ __forceinline__ void store_history(std::int32_t c) const {
        using Element = typename Op::Element;
        const int rows = padded_columns(p_.dim_v);
        const std::int64_t at = (segment_.first_chunk + c) * p_.heads_v + head_;
        state_.template store_operands<Op>(static_cast<Element*>(params_.history) + at * Op::kParts * rows * kK, v0_,
                                           rows);
    }

    __device__ __forceinline__ void store_deltas(std::int32_t c, int b, const Fragment<Op>& x) const {
        const int rows = padded_columns(p_.dim_v);
        const std::int64_t at = (segment_.first_chunk + c) * p_.heads_v + head_;
        auto* to = static_cast<typename Op::Element*>(params_.deltas) + at * Op::kParts * rows * kChunk;
        const BlockedRows<Op, kChunk> lines(to, v0_ + 16 * warp(), std::int64_t(rows) * kChunk);
#pragma unroll
        for (int block = 0; block < 4; ++block) lines.set(block % 2, 2 * b + block / 2, x.pair(block));
    }

    __device__ __forceinline__ void step(std::int32_t c, Stage& s) {
        if constexpr (kScaled) keep_in_range();
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
            if (!transition_) values = s.v.a_transposed(16 * b, v);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const int t = 16 * b + 8 * n + column();
                const float2 beta = pair_of(prepared.beta, t), read = pair_of(prepared.read, t);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float2 value = {0.0f, 0.0f};
                    if (!transition_) value = values.pair(2 * n + half).value();
                    if constexpr (kScaled) value.x *= inverse_unit_, value.y *= inverse_unit_;
                    float* reads = &u[2 * b + n][2 * half];
                    const float first = fmaf(-read.x, reads[0], beta.x * value.x);
                    const float second = fmaf(-read.y, reads[1], beta.y * value.y);
                    residual[b].set(2 * n + half, Pair<Exact>::of(first, second));
                    reads[0] = reads[1] = 0.0f;
                }
                if constexpr (kOutputs) {
                    const float2 query = pair_of(prepared.query, t);
                    float(&out)[4] = o[2 * b + n];
                    out[0] *= query.x, out[1] *= query.y, out[2] *= query.x, out[3] *= query.y;
                }
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
                const float2 keep = pair_of(prepared.keep, 16 * b + 8 * n + column());
                float(&out)[4] = u[2 * b + n];
                out[0] *= keep.x, out[1] *= keep.y, out[2] *= keep.x, out[3] *= keep.y;
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

    static __device__ __forceinline__ float2 pair_of(const float* x, int i) {
        return *reinterpret_cast<const float2*>(x + i);
    }

    // O^T to o. 16-bit rows are turned in the place of this warp's values and leave in 16-byte stores.
    __device__ __forceinline__ void store_outputs(Stage& s, float (&o)[2 * kBlocks][4]) {
        const int tokens = to_store_, v = 16 * warp(), columns = p_.dim_v - v0_ - v;
        const std::int64_t stride = only_here(call_.o.token);
        to_store_ -= kChunk;
        if constexpr (kScaled) {
#pragma unroll
            for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[n][e] *= unit_;
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

    const ChunkParams& params_;
    const ForwardCall& call_;
    const Problem& p_;
    Stage* const stages_;
    const Segment segment_;
    const std::int64_t number_;  // of the segment
    const std::int32_t head_;
    int v0_;
    bool transition_ = false;  // the columns are those of M: v = 0, and a start from the identity
    const Span span_;
    const Slots slots_;
    StateRows<kK> state_;
    float unit_ = 1.0f, inverse_unit_ = 1.0f;  // of state_; only with kScaled

    RowWalk<Config::kThreads, Op, kChunk, kK> k_, q_;
    RowWalk<Config::kThreads, Op, kChunk, Config::kColumns> v_;
    std::int64_t record_ = 0, o_at_ = 0;  // of the next chunk to load, of the next one to store
    int to_load_ = 0, to_store_ = 0;      // tokens left
};

template <class Config, ChunkMode kMode>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    chunk_kernel(const __grid_constant__ ChunkParams params) {
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
