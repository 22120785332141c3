#include <numeric>

#include "reference/recurrence.hpp"
#include "reference/reference.hpp"

namespace flashqla::reference {
namespace {

// x_bar <- gradient of the row before l2norm; y is the normalised row, factor what it was multiplied by.
void normalise_backward(double* x_bar, const double* y, double factor, std::int64_t size) noexcept {
    const double along = std::inner_product(y, y + size, x_bar, 0.0);
    for (std::int64_t i = 0; i < size; ++i) x_bar[i] = factor * (x_bar[i] - along * y[i]);
}

// One token. D [K,V] enters as the gradient of the state after it and leaves as that of the state before it.
void token_backward(const BackwardCall& call, const Span& span, std::int64_t t, std::int32_t h, double* before,
                    double* after, double* D, const Scratch& scratch) noexcept {
    const Problem& p = call.problem;
    const std::int64_t b = span.batch, row = span.begin + t;
    double *d_q = scratch.d_q + t * p.dim_k, *d_k = scratch.d_k + t * p.dim_k;
    Token token(p, scratch.token);
    load_token(call, b, row, h, token);
    step(p, token, before, after);
    std::fill_n(token.d_o, p.dim_v, 0.0);
    if (call.d_o) load_row(call.d_o, call.d_o.offset(b, row, h), p.dim_v, token.d_o);

    // read: o = scale S'^T q
    each(p, [&](std::int64_t k, std::int64_t v, std::int64_t i) {
        d_q[k] += p.scale * after[i] * token.d_o[v];
        D[i] += p.scale * token.q[k] * token.d_o[v];
    });
    // delta: S' = Sd + k (beta error)^T
    double d_beta = 0.0, d_decay = 0.0;
    std::fill_n(token.d_error, p.dim_v, 0.0);
    each(p, [&](std::int64_t k, std::int64_t v, std::int64_t i) {
        d_k[k] += D[i] * token.beta * token.error[v];
        d_beta += D[i] * token.k[k] * token.error[v];
        token.d_error[v] += D[i] * token.k[k] * token.beta;
    });
    // error = v - Sd^T k, Sd = decay S
    each(p, [&](std::int64_t k, std::int64_t v, std::int64_t i) {
        d_k[k] -= token.decay * before[i] * token.d_error[v];
        D[i] -= token.k[k] * token.d_error[v];
        d_decay += D[i] * before[i];
        D[i] *= token.decay;
    });

    store_row(call.d_v, call.d_v.offset(b, row, h), p.dim_v, token.d_error);
    d_beta *= token.beta_slope;
    store_row(call.d_beta, call.d_beta.offset(b, row, h), 1, &d_beta);
    // NOTE: selected, not multiplied: a gate of -infinity has no gradient, and 0 * infinity would be NaN.
    const bool open = token.decay != 0.0;
    const double d_log_decay = open ? d_decay * token.decay : 0.0;
    const double d_g = open ? d_log_decay * token.log_decay_slope : 0.0;
    store_row(call.d_g, call.d_g.offset(b, row, h), 1, &d_g);
    if (p.gate == Gate::raw) {
        scratch.d_A_log[h] += open ? d_log_decay * token.log_decay : 0.0;
        scratch.d_dt_bias[h] += d_g;
    }
}

// One sequence of one value head: forward to the segment starts, then segment by segment back.
void run_head(const BackwardCall& call, std::int64_t n, const Span& span, std::int32_t h,
              const Scratch& scratch) noexcept {
    const Problem& p = call.problem;
    const std::int64_t size = static_cast<std::int64_t>(p.dim_k) * p.dim_v;
    double *starts = scratch.starts, *states = scratch.states, *D = scratch.d_state;
    Token token(p, scratch.token);
    load_state(p, call.initial_state, n, h, states);
    for (std::int64_t t = 0; t < span.length; ++t) {
        if (t % scratch.segment == 0) std::copy_n(states, size, starts + t / scratch.segment * size);
        load_token(call, span.batch, span.begin + t, h, token);
        step(p, token, states, states);
    }
    load_state(p, call.d_final_state, n, h, D);
    for (std::int64_t end = span.length; end > 0;) {
        const std::int64_t begin = (end - 1) / scratch.segment * scratch.segment;
        std::copy_n(starts + begin / scratch.segment * size, size, states);
        for (std::int64_t t = begin; t < end; ++t) {
            load_token(call, span.batch, span.begin + t, h, token);
            step(p, token, states + (t - begin) * size, states + (t - begin + 1) * size);
        }
        for (std::int64_t t = end; t-- > begin;) {
            double* before = states + (t - begin) * size;
            token_backward(call, span, t, h, before, before + size, D, scratch);
        }
        end = begin;
    }
    store_state(p, call.d_initial_state, n, h, D);
}

// d_q and d_k are complete once every value head of the group has added its share.
void store_key_head(const BackwardCall& call, const Span& span, std::int32_t hk, const Scratch& scratch) noexcept {
    const Problem& p = call.problem;
    Token token(p, scratch.token);
    for (std::int64_t t = 0; t < span.length; ++t) {
        const std::int64_t row = span.begin + t;
        double *d_q = scratch.d_q + t * p.dim_k, *d_k = scratch.d_k + t * p.dim_k;
        if (p.qk_l2norm) {
            load_token(call, span.batch, row, call.value_head(hk, 0), token);
            normalise_backward(d_q, token.q, token.q_factor, p.dim_k);
            normalise_backward(d_k, token.k, token.k_factor, p.dim_k);
        }
        store_row(call.d_q, call.d_q.offset(span.batch, row, hk), p.dim_k, d_q);
        store_row(call.d_k, call.d_k.offset(span.batch, row, hk), p.dim_k, d_k);
    }
}

}  // namespace

Status backward(const BackwardCall& call, const Scratch& scratch) noexcept {
    const Problem& p = call.problem;
    std::fill_n(scratch.d_A_log, p.heads_v, 0.0);
    std::fill_n(scratch.d_dt_bias, p.heads_v, 0.0);
    for (std::int64_t n = 0; n < call.count; ++n) {
        const Span span = span_of(call, n);
        for (std::int32_t hk = 0; hk < p.heads_k; ++hk) {
            std::fill_n(scratch.d_q, span.length * p.dim_k, 0.0);
            std::fill_n(scratch.d_k, span.length * p.dim_k, 0.0);
            for (std::int32_t i = 0; i < call.group(); ++i) {
                run_head(call, n, span, call.value_head(hk, i), scratch);
            }
            store_key_head(call, span, hk, scratch);
        }
    }
    for (std::int32_t h = 0; h < p.heads_v; ++h) {
        const HeadRef &a = call.d_A_log, &b = call.d_dt_bias;
        if (a) store(a.data, a.dtype, h * a.stride, scratch.d_A_log[h]);
        if (b) store(b.data, b.dtype, h * b.stride, scratch.d_dt_bias[h]);
    }
    zero_tail(call, call.d_q, p.heads_k, p.dim_k);
    zero_tail(call, call.d_k, p.heads_k, p.dim_k);
    zero_tail(call, call.d_v, p.heads_v, p.dim_v);
    zero_tail(call, call.d_g, p.heads_v, 1);
    zero_tail(call, call.d_beta, p.heads_v, 1);
    return {};
}

}  // namespace flashqla::reference
