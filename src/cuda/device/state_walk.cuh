// What every kernel does with a state that it takes through the chunks of a segment, whatever multiplies it: where it
// begins and ends, checkpoints, and units for fp16.
#pragma once

#include <type_traits>

#include "cuda/chunk_params.hpp"
#include "cuda/device/chunks.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/device/state_rows.cuh"

namespace flashqla::cuda {

// Which state, and where it goes.
struct StatePlace {
    Segment segment;
    Span span;
    Slots slots;
    std::int64_t number;  // of the segment
    std::int32_t head, v0;
    bool transition;  // the columns are those of M: v = 0, and a start from the identity
    // Chunks before the segment that are walked through first, from zeros, in place of its start state; 0: none. Only
    // for kernels that are lean.
    std::int32_t warm = 0;
};

// Whether the final state takes the place of the initial one, which something else may still have to read.
__device__ __forceinline__ bool final_is_initial(const ForwardCall& call, const StatePlace& at) {
    return at.slots.read >= 0 && at.slots.read == at.slots.write && call.initial_state.data == call.final_state.data;
}
// Whether the first segment keeps its start for its outputs, since the last one may end before they begin.
__device__ __forceinline__ bool start_is_kept(const ForwardCall& call, const StatePlace& at) {
    return at.segment.index == 0 && !at.segment.last && final_is_initial(call, at);
}

// kColumns: rows of S^T that a block has, a warp 16 of them. kScaled: see keep_in_range. kLean: the place stays in
// shared memory and nothing is called, for kernels whose registers are full and whose products may not be waited for.
template <int kK, int kColumns, ChunkMode kMode, bool kScaled, bool kLean>
class StateWalk {
protected:
    static constexpr int kThreads = 2 * kColumns;  // that hold a state
    static constexpr bool kOutputs = kMode == ChunkMode::outputs;
    using Cursor = BasicCheckpointCursor<false>;

    // NOTE: if lean, what `place` says is there after the next barrier of the block.
    __device__ __forceinline__ StateWalk(const ChunkParams& params, const StatePlace& place)
        : params_(params), call_(params.call), p_(params.call.problem), at_(place) {}

    static __device__ __forceinline__ StatePlace place_of(const ChunkParams& params, const Segment& segment,
                                                          std::int64_t number, std::int32_t head, int tile) {
        return {segment, clamped_span(params.call, segment.n), clamped_slots(params.call, segment.n), number,
                head,    first_column(params, tile),           is_transition(params, tile),           0};
    }
    // Tiles of a segment's transition come behind those of V.
    static __device__ __forceinline__ bool is_transition(const ChunkParams& params, int tile) {
        return kMode == ChunkMode::ends && tile >= value_tiles(params);
    }
    static __device__ __forceinline__ int first_column(const ChunkParams& params, int tile) {
        return (is_transition(params, tile) ? tile - value_tiles(params) : tile) * kColumns;
    }
    static __device__ __forceinline__ int value_tiles(const ChunkParams& params) {
        return (params.call.problem.dim_v + kColumns - 1) / kColumns;
    }

    // Whether there are chunks to walk through, for the whole block.
    static __device__ __forceinline__ bool walks(const StatePlace& at) {
        if constexpr (kMode == ChunkMode::ends) {
            return !at.segment.last && !at.slots.padding && !(at.transition && at.segment.index == 0);
        }
        return !(kOutputs && at.slots.padding);
    }

    // Tokens of the segment.
    static __device__ __forceinline__ int tokens_of(const StatePlace& at, std::int32_t chunk) {
        const std::int64_t left = at.span.length - at.segment.first_token;
        const std::int64_t inside = std::int64_t(at.segment.chunks) * chunk;
        return static_cast<int>(left < inside ? left : inside);
    }
    __device__ __forceinline__ int tokens() const { return tokens_of(at_, params_.table.chunk); }

    // ------------------------------------------------------------------------------------------ start and end

    __device__ __forceinline__ void start() {
        if constexpr (kOutputs) {
            next_checkpoint_ = static_cast<std::int32_t>(checkpoints(at_.segment.first_token).next());
        }
        const std::int64_t row = at_.number * p_.heads_v + at_.head;
        const auto kept = [&] { return params_.states.starts + row * p_.dim_v * p_.dim_k; };
        bool from_cut = at_.segment.index > 0;
        if constexpr (kOutputs) from_cut = from_cut || start_is_kept();
        if (from_cut) {
            if constexpr (kMode == ChunkMode::ends) {
                state_.zero();
                if (at_.transition) state_.identity(at_.v0);
            } else if (kLean && at_.warm > 0) {
                state_.zero();
            } else {
                state_.load_rows(kept(), at_.v0, p_.dim_v, p_.dim_k);
            }
        } else if (at_.slots.read >= 0) {
            if constexpr (kLean) {
                state_.load_here(call_.initial_state, p_, at_.slots.read, at_.head, at_.v0);
            } else {
                state_.load(call_.initial_state, p_, at_.slots.read, at_.head, at_.v0);
            }
            if constexpr (kMode == ChunkMode::ends) {
                if (start_is_kept()) state_.store_rows(kept(), at_.v0, p_.dim_v, p_.dim_k);
            }
        } else {
            state_.zero();
        }
    }

    // Where the final state takes the place of the initial one, the last segment of a sequence may store it before the
    // first one has read. What walks for the ends reads earlier, and keeps the state that enters the sequence as the
    // start of its first segment.
    __device__ __forceinline__ bool start_is_kept() const { return cuda::start_is_kept(call_, at_); }

    __device__ __forceinline__ void finish() {
        to_real_units();
        if constexpr (kOutputs) {
            if (at_.segment.last && at_.slots.write >= 0) store(call_.final_state, at_.slots.write);
        }
        if constexpr (kMode == ChunkMode::ends) {
            const std::int64_t row = at_.number * p_.heads_v + at_.head;
            float* to = params_.states.ends + row * (p_.dim_v + p_.dim_k) * p_.dim_k;
            if (at_.transition) {
                state_.store_rows(to + std::int64_t(p_.dim_v) * p_.dim_k, at_.v0, p_.dim_k, p_.dim_k);
            } else {
                state_.store_rows(to, at_.v0, p_.dim_v, p_.dim_k);
            }
        }
    }

    __device__ __forceinline__ void store(const StateRef& to, std::int64_t row) {
        if constexpr (kLean) {
            state_.store_here(to, p_, row, at_.head, at_.v0);
        } else {
            state_.store(to, p_, row, at_.head, at_.v0);
        }
    }

    // The checkpoints from token t of the sequence on.
    __device__ __forceinline__ Cursor checkpoints(std::int64_t t) const {
        Cursor cursor(call_, at_.segment.n, at_.span.length);
        cursor.skip(t);
        return cursor;
    }
    // The state before token t of the sequence, if the next checkpoint wants it. NOTE: the cursor is made anew, which
    // takes a while; kept, it would take ten registers.
    __device__ __forceinline__ void keep_checkpoint(std::int32_t t) {
        if (t == next_checkpoint_) [[unlikely]] {
            to_real_units();
            Cursor cursor = checkpoints(t);
            cursor.visit([&](std::int64_t row) { store(call_.checkpoints, row); });
            next_checkpoint_ = static_cast<std::int32_t>(cursor.next());
        }
    }

    // A padding row: outputs and checkpoints are zero, no slot is touched.
    __device__ __forceinline__ void run_padding() {
        const std::int64_t count = tokens();
        for (std::int64_t i = threadIdx.x; i < count * kColumns; i += kThreads) {
            const int v = at_.v0 + static_cast<int>(i % kColumns);
            const std::int64_t t = at_.span.begin + at_.segment.first_token + i / kColumns;
            if (v < p_.dim_v) {
                store_element(call_.o.data, call_.o.dtype, call_.o.offset(at_.span.batch, t, at_.head) + v, 0.0f);
            }
        }
        if (at_.segment.index > 0) return;
        state_.zero();
        Cursor cursor = checkpoints(0);
        while (cursor.next() >= 0) {
            cursor.visit([&](std::int64_t row) { store(call_.checkpoints, row); });
        }
    }

    // ------------------------------------------------------------------------------------------------ fp16's range

    // fp16 ends at 65,504 and a state does not. Everything a chunk computes is linear in the rows of S^T and V^T, so
    // each warp may choose its unit, a power of two. It changes it when its largest element is within a factor of 16 of
    // the end of the range.
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

    const ChunkParams& params_;
    const ForwardCall& call_;
    const Problem& p_;
    std::conditional_t<kLean, const StatePlace&, const StatePlace> at_;
    StateRows<kK> state_;
    std::int32_t next_checkpoint_ = -1;        // a token of the sequence
    float unit_ = 1.0f, inverse_unit_ = 1.0f;  // of state_; only with kScaled
};

}  // namespace flashqla::cuda
