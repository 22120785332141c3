// The questions of base/call.hpp, asked on a device. The host has not seen the answers, so whatever the index tensors
// hold leads to no address outside the tensors: offsets are clamped, slots outside a pool are padding.
#pragma once

#include <cstdint>

#include "base/call.hpp"
#include "cuda/device/reduce.cuh"

namespace flashqla::cuda {

__device__ __forceinline__ std::int64_t clamp(std::int64_t x, std::int64_t low, std::int64_t high) {
    return x < low ? low : x > high ? high : x;
}

__device__ __forceinline__ Span clamped_span(const Inputs& in, std::int64_t n) {
    if (!in.cu_seqlens) return span_of(in, n);
    const std::int64_t begin = clamp(in.cu_seqlens.at(n), 0, in.problem.tokens);
    return {0, begin, clamp(in.cu_seqlens.at(n + 1), begin, in.problem.tokens) - begin};
}

__device__ __forceinline__ std::int64_t clamped_used_tokens(const Inputs& in) {
    return clamp(used_tokens(in), 0, in.problem.tokens);
}

__device__ __forceinline__ Slots clamped_slots(Slots slots, std::int64_t rows_in, std::int64_t rows_out,
                                               bool own_write) {
    if (slots.padding || slots.read >= rows_in) return {true, -1, -1};
    if (slots.write < rows_out) return slots;
    // A slot of state_indices_out is one to write only; the row itself is real.
    return own_write ? Slots{false, slots.read, -1} : Slots{true, -1, -1};
}
__device__ __forceinline__ Slots clamped_slots(const ForwardCall& call, std::int64_t n) {
    return clamped_slots(slots_of(call, n), call.initial_state.rows, call.final_state.rows,
                         static_cast<bool>(call.state_indices_out));
}
__device__ __forceinline__ Slots clamped_slots(const DecodeCall& call, std::int64_t n) {
    return clamped_slots(slots_of(call, n), call.state.rows, call.state.rows,
                         static_cast<bool>(call.state_indices_out));
}

// Rows of checkpoints that a sequence of this length has; not for Checkpoints::listed.
__device__ __forceinline__ std::int64_t checkpoint_count(const Problem& p, std::int64_t length) {
    if (p.checkpoints == Checkpoints::chunk_starts) return (length + kChunk - 1) / kChunk;
    return p.checkpoints == Checkpoints::every_n ? length / p.checkpoint_every : 0;
}

// Walks over the checkpoints of one sequence in the order of their tokens. Every warp walks for itself and all its
// lanes together. Without kListed, Checkpoints::listed counts as none.
template <bool kListed>
class BasicCheckpointCursor {
public:
    __device__ __forceinline__ BasicCheckpointCursor(const ForwardCall& call, std::int64_t n, std::int64_t length)
        : call_(call), n_(n), length_(length) {
        const Problem& p = call.problem;
        switch (call.checkpoints ? p.checkpoints : Checkpoints::none) {
            case Checkpoints::none: return;
            case Checkpoints::chunk_starts: next_ = length > 0 ? 0 : -1; break;
            case Checkpoints::every_n: next_ = p.checkpoint_every <= length ? p.checkpoint_every : -1; break;
            case Checkpoints::listed:
                if constexpr (kListed) next_ = next_listed(-1);
                return;
        }
        if (next_ >= 0) first_row_ = first_row();
    }

    // Leaves out the checkpoints before a token; not for Checkpoints::listed.
    __device__ __forceinline__ void skip(std::int64_t token) {
        if (next_ < 0 || next_ >= token) return;
        const bool chunks = call_.problem.checkpoints == Checkpoints::chunk_starts;
        const std::int64_t every = chunks ? kChunk : call_.problem.checkpoint_every;
        next_ = (token + every - 1) / every * every;
        if (next_ > (chunks ? length_ - 1 : length_)) next_ = -1;
    }

    // How many tokens are done when the next checkpoint is due; -1 = there is none.
    __device__ __forceinline__ std::int64_t next() const { return next_; }

    // Calls store(row) for each checkpoint that is due and moves on.
    template <class F>
    __device__ __forceinline__ void visit(F&& store) {
        const Problem& p = call_.problem;
        if constexpr (kListed) {
            if (p.checkpoints == Checkpoints::listed) {
                each_listed(next_, store);
                next_ = next_listed(next_);
                return;
            }
        }
        const bool chunks = p.checkpoints == Checkpoints::chunk_starts;
        const std::int64_t every = chunks ? kChunk : p.checkpoint_every;
        const std::int64_t row = first_row_ + next_ / every - (chunks ? 0 : 1);
        // Malformed offsets may promise more rows than there are.
        if (row < call_.checkpoints.rows) store(row);
        const std::int64_t last = chunks ? length_ - 1 : length_;
        next_ = every <= last - next_ ? next_ + every : -1;
    }

private:
    // Sequences lie one after another.
    __device__ __forceinline__ std::int64_t first_row() const {
        if (!call_.cu_seqlens) return n_ * checkpoint_count(call_.problem, length_);
        std::int64_t rows = 0;
        for (std::int64_t m = threadIdx.x % 32; m < n_; m += 32) {
            rows += checkpoint_count(call_.problem, clamped_span(call_, m).length);
        }
        return warp_sum(rows);
    }

    __device__ __forceinline__ std::int64_t next_listed(std::int64_t after) const {
        const IndexRef& list = call_.checkpoint_list;
        std::int64_t least = INT64_MAX;
        for (std::int64_t row = threadIdx.x % 32; row < list.count; row += 32) {
            const std::int64_t token = list.at(row, 1);
            if (list.at(row, 0) == n_ && token > after && token < least) least = token;
        }
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) {
            const std::int64_t other = __shfl_xor_sync(kFullWarp, least, bit);
            least = other < least ? other : least;
        }
        return least <= length_ ? least : -1;
    }

    template <class F>
    __device__ __forceinline__ void each_listed(std::int64_t token, F&& store) const {
        const IndexRef& list = call_.checkpoint_list;
        for (std::int64_t begin = 0; begin < list.count; begin += 32) {
            const std::int64_t row = begin + threadIdx.x % 32;
            const bool due = row < list.count && list.at(row, 0) == n_ && list.at(row, 1) == token;
            for (unsigned left = __ballot_sync(kFullWarp, due); left != 0; left &= left - 1) {
                store(begin + __ffs(static_cast<int>(left)) - 1);
            }
        }
    }

    const ForwardCall& call_;
    std::int64_t n_, length_, first_row_ = 0, next_ = -1;
};
using CheckpointCursor = BasicCheckpointCursor<true>;

}  // namespace flashqla::cuda
