#include "reference/recurrence.hpp"
#include "reference/reference.hpp"

namespace flashqla::reference {
namespace {

void decode_row(const DecodeCall& call, std::int64_t n, const Span& span, std::int32_t h,
                const Scratch& scratch) noexcept {
    const Problem& p = call.problem;
    const Slots slots = slots_of(call, n);
    // state(t) [K,V]: after t tokens of the run; in a tree, after token t - 1 and its ancestors.
    const auto state = [&](std::int64_t t) { return scratch.states + t * p.dim_k * p.dim_v; };
    load_state(p, call.state, slots.read, h, state(0));
    for (std::int64_t t = 0; t < span.length; ++t) {
        const std::int64_t at = call.o.offset(span.batch, span.begin + t, h);
        if (slots.padding) {
            store_row(call.o, at, p.dim_v, nullptr);
            continue;
        }
        const std::int64_t parent = call.parent_tokens ? call.parent_tokens.at(n, t) : t - 1;
        Token token(p, scratch.token);
        load_token(call, span.batch, span.begin + t, h, token);
        step(p, token, state(parent < 0 ? 0 : parent + 1), state(t + 1));
        read(p, token, state(t + 1));
        store_row(call.o, at, p.dim_v, token.o);
        store_state(p, call.state, token_slot(call, n, t), h, state(t + 1));
        store_state(p, call.intermediate_states, intermediate_row(call, n), h, state(t + 1), t);
    }
    store_state(p, call.state, slots.write, h, state(span.length));
}

}  // namespace

Status decode(const DecodeCall& call, const Scratch& scratch) noexcept {
    const Problem& p = call.problem;
    for (std::int64_t n = 0; n < call.count; ++n) {
        const Span span = span_of(call, n);
        if (span.length > kMaxDecodeTokens) return {Code::internal, "flashqla::decode: a row has over 16 tokens"};
        for (std::int32_t h = 0; h < p.heads_v; ++h) decode_row(call, n, span, h, scratch);
    }
    zero_tail(call, call.o, p.heads_v, p.dim_v);
    return {};
}

}  // namespace flashqla::reference
