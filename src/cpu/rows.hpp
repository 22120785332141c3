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

// Zeroes o where no task will write: the tail, and the tokens of padding rows.
template <class Call>
void zero_unused_rows(const Call& call, std::int32_t threads) {
    const Problem& p = call.problem;
    zero_tail(call, call.o, p.heads_v, p.dim_v, threads);
    for (std::int64_t n = 0; n < call.count; ++n) {
        if (!slots_of(call, n).padding) continue;
        const Span span = span_of(call, n);
        for (std::int64_t t = 0; t < span.length; ++t)
            zero_row(call.o, span.batch, span.begin + t, p.heads_v, p.dim_v);
    }
}

}  // namespace flashqla::cpu
