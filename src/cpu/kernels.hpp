// The kernels of the CPU backend as plain functions, one set per SIMD target, and the tasks they work on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/call.hpp"

namespace flashqla::cpu {

// Sizes that scratch memory and task lists are made from; decided at plan time.
struct Shape {
    std::int32_t dim_k = 0, dim_v = 0;
    std::int32_t group = 1;         // value heads that share a key head
    std::int32_t key_heads = 1;     // key heads a task owns
    std::int32_t slice_strips = 1;  // strips of value columns a task owns
    bool bf16_dot = false;          // operands of the large products in bf16 pairs
};

// Where the states of a task come from and go to besides the call's own state tensors.
enum class StateEnd { call, zeros, identity, carry };

// One (sequence segment, block of key heads, slice of value columns) of the chunked forward pass.
struct ForwardTask {
    const ForwardCall* call = nullptr;
    Shape shape;
    std::int64_t sequence = 0;
    Span span;                     // the segment's tokens
    std::int64_t first_token = 0;  // position of the segment in its sequence
    Slots slots;                   // state rows, used where an end is StateEnd::call
    std::int32_t key_begin = 0, key_end = 0;
    std::int32_t strip_begin = 0, strip_end = 0;
    StateEnd from = StateEnd::call, to = StateEnd::call;
    const float* carry_in = nullptr;  // [Hv,K,V] dense
    float* carry_out = nullptr;       // [Hv,K,V], or [Hv,K,K] for the transition matrix
    bool transition = false;          // columns are the K columns of M: v = 0, no output
    bool write_output = true;
    bool last = true;                 // the sequence ends with this segment
    std::int64_t checkpoint_row = 0;  // first checkpoint row of this sequence
};

// One (row, value head) of the recurrent pass: decode, verify and short sequences.
struct RecurrentTask {
    const Inputs* inputs = nullptr;
    Span span;
    std::int32_t value_head = 0;
    StateRef state_in, state_out;
    Slots slots;
    const void* next_state = nullptr;  // state of the task that this thread runs next; read ahead of use
    TokenRef o;
    const DecodeCall* decode = nullptr;    // verification contracts; null for a forward call
    const ForwardCall* forward = nullptr;  // checkpoints; null for a decode call
    std::int64_t row = 0;                  // n
    std::int64_t checkpoint_row = 0;
};

// One (sequence segment, key head) of the backward pass.
struct BackwardTask {
    const BackwardCall* call = nullptr;
    Shape shape;
    std::int64_t sequence = 0;
    Span span;
    std::int32_t key_head = 0;
    std::int64_t scratch_tokens = 0;    // tokens the scratch memory was sized for
    bool first = true, last = true;     // segments of the sequence: it begins, it ends with this one
    const float* carry_in = nullptr;    // [Hv,K,V] state at the start, unless first
    const float* adjoint_in = nullptr;  // [Hv,K,V] adjoint of the state at the end, unless last; null = zero
    float* adjoint_out = nullptr;       // [Hv,K,V]: only the adjoint of the state at the start is wanted
    double* d_A_log = nullptr;          // [Hv] partial sums of this sequence
    double* d_dt_bias = nullptr;        // [Hv]
};

struct Kernels {
    const char* name;           // "AVX2", ...
    bool bf16_dot;              // has bf16 dot products
    std::size_t strip_columns;  // value columns a kernel works on at a time
    std::int32_t strips(std::int32_t columns) const {
        const auto width = static_cast<std::int32_t>(strip_columns);
        return (columns + width - 1) / width;
    }

    std::size_t (*forward_scratch)(const Shape&);  // bytes a thread needs
    void (*forward)(const ForwardTask&, std::byte* scratch);
    std::size_t (*recurrent_scratch)(const Shape&);
    void (*recurrent)(const RecurrentTask&, std::byte* scratch);
    std::size_t (*backward_scratch)(const Shape&, std::int64_t tokens);
    void (*backward)(const BackwardTask&, std::byte* scratch);
    // carry_out [K,V] = star [K,V] + transition [K,K] carry_in [K,V], one value head.
    void (*join)(const Shape&, const float* star, const float* transition, const float* carry_in, float* carry_out);
    // adjoint [K,V] += transition^T [K,K] later [K,V], one value head.
    void (*join_adjoint)(const Shape&, const float* transition, const float* later, float* adjoint);
};

// The kernels of the best target this processor supports, or of the one named by the environment variable
// FQLA_CPU_TARGET (for tests). Never null.
const Kernels& kernels() noexcept;

// Names of all targets compiled in that this processor can run, best first, comma separated.
const char* supported_targets() noexcept;

}  // namespace flashqla::cpu
