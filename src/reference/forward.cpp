#include "reference/recurrence.hpp"
#include "reference/reference.hpp"

namespace flashqla::reference {
namespace {

std::int64_t checkpoint_rows(const Problem& p, std::int64_t length) noexcept {
    if (p.checkpoints == Checkpoints::chunk_starts) return (length + kChunk - 1) / kChunk;
    return p.checkpoints == Checkpoints::every_n ? length / p.checkpoint_every : 0;
}

// S is the state after the first `done` tokens of sequence n, whose checkpoints start at first_row.
void store_checkpoints(const ForwardCall& call, std::int64_t n, std::int64_t first_row, std::int64_t done,
                       std::int64_t length, std::int32_t h, const double* S) noexcept {
    const Problem& p = call.problem;
    const std::int64_t every = p.checkpoint_every;
    if (p.checkpoints == Checkpoints::chunk_starts && done < length && done % kChunk == 0) {
        store_state(p, call.checkpoints, first_row + done / kChunk, h, S);
    }
    if (p.checkpoints == Checkpoints::every_n && done > 0 && done % every == 0) {
        store_state(p, call.checkpoints, first_row + done / every - 1, h, S);
    }
    if (p.checkpoints == Checkpoints::listed) {
        const IndexRef& list = call.checkpoint_list;
        for (std::int64_t row = 0; row < list.count; ++row) {
            if (list.at(row, 0) == n && list.at(row, 1) == done) store_state(p, call.checkpoints, row, h, S);
        }
    }
}

}  // namespace

Status forward(const ForwardCall& call, const Scratch& scratch) noexcept {
    const Problem& p = call.problem;
    double* S = scratch.states;  // [K,V]
    std::int64_t first_row = 0;
    for (std::int64_t n = 0; n < call.count; ++n) {
        const Span span = span_of(call, n);
        const Slots slots = slots_of(call, n);
        for (std::int32_t h = 0; h < p.heads_v; ++h) {
            load_state(p, call.initial_state, slots.read, h, S);
            for (std::int64_t t = 0; t < span.length; ++t) {
                store_checkpoints(call, n, first_row, t, span.length, h, S);
                const std::int64_t at = call.o.offset(span.batch, span.begin + t, h);
                if (slots.padding) {
                    store_row(call.o, at, p.dim_v, nullptr);
                    continue;
                }
                Token token(p, scratch.token);
                load_token(call, span.batch, span.begin + t, h, token);
                step(p, token, S, S);
                read(p, token, S);
                store_row(call.o, at, p.dim_v, token.o);
            }
            store_checkpoints(call, n, first_row, span.length, span.length, h, S);
            store_state(p, call.final_state, slots.write, h, S);
        }
        first_row += checkpoint_rows(p, span.length);
    }
    zero_tail(call, call.o, p.heads_v, p.dim_v);
    return {};
}

}  // namespace flashqla::reference
