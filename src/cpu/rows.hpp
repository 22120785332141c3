// Rows of outputs that belong to no live sequence: tokens past the last offset, and padding rows.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/call.hpp"
#include "cpu/parallel.hpp"

namespace flashqla::cpu {

inline void zero_row(const TokenRef& to, std::int64_t b, std::int64_t t, std::int64_t heads, std::int64_t width) {
    for (std::int64_t h = 0; h < heads; ++h)
        std::memset(static_cast<std::byte*>(to.data) + to.offset(b, t, h) * std::int64_t(size_of(to.dtype)), 0,
                    std::size_t(width) * size_of(to.dtype));
}

// Zeroes the tokens of `to` past the last sequence.
inline void zero_tail(const Inputs& in, const TokenRef& to, std::int64_t heads, std::int64_t width,
                      std::int32_t threads) {
    if (!to) return;
    const std::int64_t used = used_tokens(in);
    parallel_for(in.problem.tokens - used, threads,
                 [&](std::int64_t i, std::int32_t) { zero_row(to, 0, used + i, heads, width); });
}

// Checkpoint rows of a sequence that is not listed.
inline std::int64_t checkpoint_count(const Problem& p, std::int64_t length) {
    if (p.checkpoints == Checkpoints::chunk_starts) return (length + kChunk - 1) / kChunk;
    return p.checkpoints == Checkpoints::every_n ? length / p.checkpoint_every : 0;
}

// Zeroes o where no task will write: the tail, and the tokens of padding rows.
template <class Call>
void zero_unused_rows(const Call& call, std::int32_t threads) {
    const Problem& p = call.problem;
    zero_tail(call, call.o, p.heads_v, p.dim_v, threads);
    for (std::int64_t n = 0; n < call.count; ++n) {
        if (!slots_of(call, n).padding) continue;
        const Span span = span_of(call, n);
        for (std::int64_t t = 0; t < span.length; ++t) zero_row(call.o, span.batch, span.begin + t, p.heads_v, p.dim_v);
    }
}

// Zeroes the checkpoints of padding rows. first_row[n]: checkpoint row that sequence n begins with; null when listed.
inline void zero_unused_checkpoints(const ForwardCall& call, const std::int64_t* first_row) {
    const Problem& p = call.problem;
    const auto zero_state = [&](std::int64_t row) {
        const std::size_t width = size_of(call.checkpoints.dtype);
        const auto size = static_cast<std::size_t>(p.dim_k) * static_cast<std::size_t>(p.dim_v) * width;
        for (std::int32_t h = 0; h < p.heads_v; ++h)
            std::memset(static_cast<std::byte*>(call.checkpoints.data) +
                            call.checkpoints.offset(row, h) * static_cast<std::int64_t>(width),
                        0, size);
    };
    if (p.checkpoints == Checkpoints::listed) {
        for (std::int64_t row = 0; row < call.checkpoint_list.count; ++row) {
            const std::int64_t n = call.checkpoint_list.at(row, 0);
            if (n >= 0 && slots_of(call, n).padding) zero_state(row);
        }
        return;
    }
    for (std::int64_t n = 0; n < call.count; ++n) {
        if (!slots_of(call, n).padding) continue;
        const std::int64_t count = checkpoint_count(p, span_of(call, n).length);
        for (std::int64_t i = 0; i < count; ++i) zero_state(first_row[n] + i);
    }
}

}  // namespace flashqla::cpu
