// The rule, in double: read one token, step one state, read one output. The passes are loops around this file.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base/call.hpp"
#include "base/float16.hpp"

namespace flashqla::reference {

// A dtype that only this room knows: double. The public API refuses it; tests that call the room directly use it to
// see results before they are rounded, in finite differences for example.
inline constexpr DType kF64 = static_cast<DType>(64);

inline double load(const void* data, DType dtype, std::int64_t i) noexcept {
    return dtype == kF64 ? static_cast<const double*>(data)[i] : static_cast<double>(load_float(data, dtype, i));
}
inline double load(const HeadRef& ref, std::int64_t h) noexcept { return load(ref.data, ref.dtype, h * ref.stride); }

inline void store(void* data, DType dtype, std::int64_t i, double x) noexcept {
    if (dtype == kF64) {
        static_cast<double*>(data)[i] = x;
    } else {
        store_float(data, dtype, i, static_cast<float>(x));
    }
}

// f(k, v, i) for every element i of a state S [K,V].
template <class F>
void each(const Problem& p, F f) noexcept {
    for (std::int64_t k = 0, i = 0; k < p.dim_k; ++k) {
        for (std::int64_t v = 0; v < p.dim_v; ++v, ++i) f(k, v, i);
    }
}

inline void load_row(const TokenRef& ref, std::int64_t at, std::int64_t size, double* row) noexcept {
    for (std::int64_t i = 0; i < size; ++i) row[i] = load(ref.data, ref.dtype, at + i);
}

// row null = zeros; nothing happens when the tensor was not given.
inline void store_row(const TokenRef& ref, std::int64_t at, std::int64_t size, const double* row) noexcept {
    for (std::int64_t i = 0; ref && i < size; ++i) store(ref.data, ref.dtype, at + i, row ? row[i] : 0.0);
}

// Tokens past the last sequence are zero in every output.
inline void zero_tail(const Inputs& in, const TokenRef& ref, std::int64_t heads, std::int64_t size) noexcept {
    for (std::int64_t t = used_tokens(in); t < in.problem.tokens; ++t) {
        for (std::int64_t h = 0; h < heads; ++h) store_row(ref, ref.offset(0, t, h), size, nullptr);
    }
}

// S [K,V] <- a row of a state tensor; zeros when there is none. NOTE: zeros are selected, the memory is not read, so
// NaN in a slot that nobody asked for stays there.
inline void load_state(const Problem& p, const StateRef& ref, std::int64_t row, std::int64_t h, double* S) noexcept {
    const bool real = ref && row >= 0;
    each(p, [&](std::int64_t k, std::int64_t v, std::int64_t i) {
        S[i] = real ? load(ref.data, ref.dtype, ref.offset(row, h) + k * ref.k + v * ref.v) : 0.0;
    });
}

inline void store_state(const Problem& p, const StateRef& ref, std::int64_t row, std::int64_t h, const double* S,
                        std::int64_t t = 0) noexcept {
    if (!ref || row < 0) return;
    each(p, [&](std::int64_t k, std::int64_t v, std::int64_t i) {
        store(ref.data, ref.dtype, ref.offset(row, h) + t * ref.step + k * ref.k + v * ref.v, S[i]);
    });
}

// One token of one value head as the rule sees it, with l2norm, gate and beta worked out, and what their chain rule
// needs. The arrays live in the workspace.
struct Token {
    double *q, *k;                                   // [K]
    double *v, *error, *o;                           // [V]; step() sets error = v - S^T k, read() sets o
    double *d_error, *d_o;                           // [V]; gradients, backward only
    double q_factor = 1.0, k_factor = 1.0;           // 1 / sqrt(sum x^2 + eps); 1 without l2norm
    double log_decay = 0.0, decay = 1.0;             // decay = exp(log_decay)
    double beta = 1.0;                               // with its factor
    double log_decay_slope = 0.0, beta_slope = 0.0;  // derivatives with respect to the arguments g and beta

    static std::size_t doubles(const Problem& p) noexcept {
        return std::size_t{2} * p.dim_k + std::size_t{5} * p.dim_v;
    }
    Token(const Problem& p, double* memory) noexcept
        : q(memory),
          k(q + p.dim_k),
          v(k + p.dim_k),
          error(v + p.dim_v),
          o(error + p.dim_v),
          d_error(o + p.dim_v),
          d_o(d_error + p.dim_v) {}
};

inline double sigmoid(double x) noexcept { return 1.0 / (1.0 + std::exp(-x)); }

// x <- x / sqrt(sum x^2 + eps); returns the factor.
inline double normalise(double* x, std::int64_t size, double eps) noexcept {
    double sum = eps;
    for (std::int64_t i = 0; i < size; ++i) sum += x[i] * x[i];
    const double factor = 1.0 / std::sqrt(sum);
    for (std::int64_t i = 0; i < size; ++i) x[i] *= factor;
    return factor;
}

inline void load_token(const Inputs& in, std::int64_t b, std::int64_t t, std::int32_t h, Token& token) noexcept {
    const Problem& p = in.problem;
    const std::int32_t hk = in.key_head(h);
    load_row(in.q, in.q.offset(b, t, hk), p.dim_k, token.q);
    load_row(in.k, in.k.offset(b, t, hk), p.dim_k, token.k);
    load_row(in.v, in.v.offset(b, t, h), p.dim_v, token.v);
    if (p.qk_l2norm) {
        token.q_factor = normalise(token.q, p.dim_k, p.l2norm_eps);
        token.k_factor = normalise(token.k, p.dim_k, p.l2norm_eps);
    }
    if (p.gate != Gate::none) {
        const double g = load(in.g.data, in.g.dtype, in.g.offset(b, t, h));
        token.log_decay = g;
        token.log_decay_slope = 1.0;
        if (p.gate == Gate::raw) {
            const double x = g + (in.dt_bias ? load(in.dt_bias, h) : 0.0), a = std::exp(load(in.A_log, h));
            const bool linear = x > 20.0;  // softplus with threshold 20
            token.log_decay = -a * (linear ? x : std::log1p(std::exp(x)));
            token.log_decay_slope = -a * (linear ? 1.0 : sigmoid(x));
        }
        token.decay = std::exp(token.log_decay);
    }
    // NOTE: an absent beta is one after the sigmoid and before beta_factor.
    double beta = in.beta ? load(in.beta.data, in.beta.dtype, in.beta.offset(b, t, h)) : 1.0, slope = 1.0;
    if (in.beta && p.beta_mode == BetaMode::logit) {
        beta = sigmoid(beta);
        slope = beta * (1.0 - beta);
    }
    token.beta = p.beta_factor * beta;
    token.beta_slope = p.beta_factor * slope;
}

// Decay and delta:  Sd = decay S,  error = v - Sd^T k,  S' = Sd + k (beta error)^T.  `after` may be `before`.
inline void step(const Problem& p, Token& token, const double* before, double* after) noexcept {
    std::copy_n(token.v, p.dim_v, token.error);
    each(p, [&](std::int64_t k, std::int64_t v, std::int64_t i) {
        token.error[v] -= token.decay * before[i] * token.k[k];
    });
    each(p, [&](std::int64_t k, std::int64_t v, std::int64_t i) {
        after[i] = token.decay * before[i] + token.k[k] * (token.beta * token.error[v]);
    });
}

// Read:  o = scale S^T q.
inline void read(const Problem& p, Token& token, const double* S) noexcept {
    std::fill_n(token.o, p.dim_v, 0.0);
    each(p, [&](std::int64_t k, std::int64_t v, std::int64_t i) { token.o[v] += p.scale * S[i] * token.q[k]; });
}

}  // namespace flashqla::reference
