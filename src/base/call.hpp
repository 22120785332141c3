// What a backend receives: a call whose arguments have been checked against the plan and reduced to pointers, dtypes
// and strides. Layout questions (kv or vk, pool or per-sequence, fixed or packed) are strides and helpers here, so no
// backend asks them again.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flashqla/flashqla.hpp"

// On functions that kernels call as well.
#ifdef __CUDACC__
#define FQLA_HOST_DEVICE __host__ __device__
#else
#define FQLA_HOST_DEVICE
#endif

namespace flashqla {

// A tensor [B,T,H] or [B,T,H,D]; unit stride in D. `data` null = not given.
struct TokenRef {
    void* data = nullptr;
    DType dtype = DType::none;
    std::int64_t batch = 0, token = 0, head = 0;  // strides in elements

    FQLA_HOST_DEVICE explicit operator bool() const noexcept { return data != nullptr; }
    FQLA_HOST_DEVICE std::int64_t offset(std::int64_t b, std::int64_t t, std::int64_t h) const noexcept {
        return b * batch + t * token + h * head;
    }
};

// States [rows, Hv, K, V] in either layout: S[k,v] of (row, head) lies at row*r + head*h + k*sk + v*sv.
struct StateRef {
    void* data = nullptr;
    DType dtype = DType::none;
    std::int64_t rows = 0;
    std::int64_t row = 0, head = 0, k = 0, v = 0;  // strides in elements; one of k, v is 1
    std::int64_t step = 0;                         // intermediate_states [M,T,Hv,..]: stride of T

    FQLA_HOST_DEVICE explicit operator bool() const noexcept { return data != nullptr; }
    FQLA_HOST_DEVICE std::int64_t offset(std::int64_t r, std::int64_t h) const noexcept { return r * row + h * head; }
};

// Integers [N] or [N,S], i32, i64 or u8.
struct IndexRef {
    const void* data = nullptr;
    DType dtype = DType::none;
    std::int64_t count = 0, columns = 1;
    std::int64_t stride = 0, column_stride = 0;  // in elements

    FQLA_HOST_DEVICE explicit operator bool() const noexcept { return data != nullptr; }
    FQLA_HOST_DEVICE std::int64_t at(std::int64_t n, std::int64_t column = 0) const noexcept {
        const std::int64_t i = n * stride + column * column_stride;
        switch (dtype) {
            case DType::i32: return static_cast<const std::int32_t*>(data)[i];
            case DType::i64: return static_cast<const std::int64_t*>(data)[i];
            default: return static_cast<const std::uint8_t*>(data)[i];
        }
    }
};

// [Hv] vectors: A_log, dt_bias and their gradients.
struct HeadRef {
    void* data = nullptr;
    DType dtype = DType::none;
    std::int64_t stride = 0;

    FQLA_HOST_DEVICE explicit operator bool() const noexcept { return data != nullptr; }
};

// Inputs that forward, backward and decode share.
struct Inputs {
    Problem problem;         // defaults filled in; problem.sequences > 0 when packed
    std::int64_t count = 0;  // N: sequences of this call (packed: problem.sequences, fixed: problem.batch)
    TokenRef q, k, v, g, beta;
    HeadRef A_log, dt_bias;
    IndexRef cu_seqlens;  // null: fixed length

    FQLA_HOST_DEVICE std::int32_t group() const noexcept { return problem.heads_v / problem.heads_k; }
    // Key head that value head h reads.
    FQLA_HOST_DEVICE std::int32_t key_head(std::int32_t h) const noexcept {
        return problem.grouping == Grouping::interleaved ? h / group() : h % problem.heads_k;
    }
    // The i-th value head that reads key head h.
    FQLA_HOST_DEVICE std::int32_t value_head(std::int32_t h, std::int32_t i) const noexcept {
        return problem.grouping == Grouping::interleaved ? h * group() + i : h + i * problem.heads_k;
    }
};

// Where the tokens of a sequence lie.
struct Span {
    std::int64_t batch = 0, begin = 0, length = 0;
};

FQLA_HOST_DEVICE inline Span span_of(const Inputs& in, std::int64_t n) noexcept {
    if (!in.cu_seqlens) return {n, 0, in.problem.tokens};
    const std::int64_t begin = in.cu_seqlens.at(n);
    return {0, begin, in.cu_seqlens.at(n + 1) - begin};
}

// First token row past the last sequence; rows from here to T are zero in every output.
FQLA_HOST_DEVICE inline std::int64_t used_tokens(const Inputs& in) noexcept {
    return in.cu_seqlens ? in.cu_seqlens.at(in.count) : in.problem.tokens;
}

// What happens to the state of one row: -1 = zeros on the read side, nothing on the write side.
struct Slots {
    bool padding = false;  // outputs are zero, nothing is read or written
    std::int64_t read = -1, write = -1;
};

FQLA_HOST_DEVICE inline bool is_padding(PadRule rule, std::int64_t slot) noexcept {
    return rule == PadRule::negative ? slot < 0 : slot <= 0;
}

struct ForwardCall : Inputs {
    StateRef initial_state, final_state;
    IndexRef state_indices, state_indices_out, has_initial_state;
    StateRef checkpoints;
    IndexRef checkpoint_list;  // [rows,2]
    TokenRef o;
};

struct BackwardCall : Inputs {
    StateRef initial_state, d_final_state, d_initial_state;
    TokenRef d_o, d_q, d_k, d_v, d_g, d_beta;
    HeadRef d_A_log, d_dt_bias;
};

struct DecodeCall : Inputs {
    StateRef state;
    IndexRef state_indices, state_indices_out, has_initial_state, num_accepted;
    StateRef intermediate_states;  // step = stride of T
    std::int64_t intermediate_steps = 0;
    IndexRef intermediate_indices, parent_tokens;
    TokenRef o;
    bool commit_state = true;

    FQLA_HOST_DEVICE bool slot_per_token() const noexcept { return state_indices && state_indices.columns > 1; }
};

FQLA_HOST_DEVICE inline Slots slots_of(const ForwardCall& call, std::int64_t n) noexcept {
    const PadRule rule = call.problem.pad_rule;
    Slots slots{false, n, n};
    if (call.state_indices) {
        slots.read = slots.write = call.state_indices.at(n);
        if (is_padding(rule, slots.read)) return {true, -1, -1};
    }
    if (call.state_indices_out) {
        slots.write = call.state_indices_out.at(n);
        if (is_padding(rule, slots.write)) slots.write = -1;
    }
    if (!call.initial_state || (call.has_initial_state && call.has_initial_state.at(n) == 0)) slots.read = -1;
    if (!call.final_state) slots.write = -1;
    return slots;
}

// `write` is the slot of the state after the last token; with a slot per token it stays -1 (see token_slot).
FQLA_HOST_DEVICE inline Slots slots_of(const DecodeCall& call, std::int64_t n) noexcept {
    const PadRule rule = call.problem.pad_rule;
    Slots slots{false, n, n};
    if (call.state_indices) {
        std::int64_t column = 0;
        if (call.num_accepted) {
            const std::int64_t accepted = call.num_accepted.at(n);
            if (accepted < 1 || accepted > call.state_indices.columns) return {true, -1, -1};
            column = accepted - 1;
        }
        slots.read = slots.write = call.state_indices.at(n, column);
        if (is_padding(rule, slots.read)) return {true, -1, -1};
    }
    if (call.state_indices_out) {
        slots.write = call.state_indices_out.at(n);
        if (is_padding(rule, slots.write)) slots.write = -1;
    }
    if (call.has_initial_state && call.has_initial_state.at(n) == 0) slots.read = -1;
    if (!call.commit_state || call.slot_per_token()) slots.write = -1;
    return slots;
}

// Slot that receives the state after token t under the slot-per-token contract; -1 = none.
FQLA_HOST_DEVICE inline std::int64_t token_slot(const DecodeCall& call, std::int64_t n, std::int64_t t) noexcept {
    if (!call.slot_per_token() || !call.commit_state || t >= call.state_indices.columns) return -1;
    const std::int64_t slot = call.state_indices.at(n, t);
    return is_padding(call.problem.pad_rule, slot) ? -1 : slot;
}

// Row of intermediate_states that row n of the batch writes; -1 = none.
FQLA_HOST_DEVICE inline std::int64_t intermediate_row(const DecodeCall& call, std::int64_t n) noexcept {
    if (!call.intermediate_states) return -1;
    const std::int64_t m = call.intermediate_indices ? call.intermediate_indices.at(n) : n;
    return m < 0 ? -1 : m;
}

struct CommitCall {
    StateRef state, intermediate_states;
    IndexRef state_indices, intermediate_indices, accepted;
    std::int64_t count = 0, steps = 0;
    std::int32_t heads_v = 0, dim_k = 0, dim_v = 0;
    PadRule pad_rule = PadRule::negative;
};

// Where row n is copied from and to; slot -1 = it stays as it is.
struct Move {
    std::int64_t slot = -1, m = 0, step = 0;
};

FQLA_HOST_DEVICE inline Move move_of(const CommitCall& call, std::int64_t n) noexcept {
    const std::int64_t slot = call.state_indices ? call.state_indices.at(n) : n;
    const std::int64_t m = call.intermediate_indices ? call.intermediate_indices.at(n) : n;
    const std::int64_t accepted = call.accepted.at(n);
    if ((call.state_indices && is_padding(call.pad_rule, slot)) || m < 0) return {};
    if (accepted < 1 || accepted > call.steps) return {};
    return {slot, m, accepted - 1};
}

}  // namespace flashqla
