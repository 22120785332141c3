// What a chunk needs besides products: decays, betas, norms, and the two small triangular matrices. Compiled per
// target.

// NOTE: the guard toggles, see simd-inl.hpp.
#if defined(FQLA_CPU_GATES_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FQLA_CPU_GATES_INL_HPP_
#undef FQLA_CPU_GATES_INL_HPP_
#else
#define FQLA_CPU_GATES_INL_HPP_
#endif

#include <cmath>

#include "base/call.hpp"
#include "cpu/simd-inl.hpp"
#include "hwy/contrib/math/math-inl.h"

FQLA_BEGIN_TARGET
namespace flashqla::cpu {
namespace HWY_NAMESPACE {

// Below this a decay is zero in fp32 with room to spare. It also turns -inf into a number, so that differences of
// running sums never become inf - inf.
inline constexpr double kSmallestLogDecay = -1.0e4;

HWY_INLINE double softplus(double x) { return x > 20.0 ? x : std::log1p(std::exp(x)); }

HWY_INLINE double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// Log decay of one token.
HWY_INLINE double log_decay(const Inputs& in, const Span& span, std::int64_t t, std::int32_t head) {
    if (in.problem.gate == Gate::none) return 0.0;
    double g = load_float(in.g.data, in.g.dtype, in.g.offset(span.batch, span.begin + t, head));
    if (in.problem.gate == Gate::raw) {
        const double bias = in.dt_bias ? load_float(in.dt_bias.data, in.dt_bias.dtype, head * in.dt_bias.stride) : 0.0f;
        const double rate = std::exp(double(load_float(in.A_log.data, in.A_log.dtype, head * in.A_log.stride)));
        g = -rate * softplus(g + bias);
    }
    return g < kSmallestLogDecay ? kSmallestLogDecay : g;
}

HWY_INLINE float beta_of(const Inputs& in, const Span& span, std::int64_t t, std::int32_t head) {
    if (!in.beta) return in.problem.beta_factor;
    const float b = load_float(in.beta.data, in.beta.dtype, in.beta.offset(span.batch, span.begin + t, head));
    return in.problem.beta_factor * (in.problem.beta_mode == BetaMode::logit ? static_cast<float>(sigmoid(b)) : b);
}

// 1 / sqrt(sum x^2 + eps), or 1 when the option is off.
HWY_INLINE float inverse_norm(const Inputs& in, const float* row, std::size_t n) {
    if (!in.problem.qk_l2norm) return 1.0f;
    const FloatTag d;
    auto sum = hn::Zero(d);
    std::size_t i = 0;
    for (; i + lanes() <= n; i += lanes()) {
        const auto x = hn::LoadU(d, row + i);
        sum = hn::MulAdd(x, x, sum);
    }
    float total = hn::GetLane(hn::SumOfLanes(d, sum));
    for (; i < n; ++i) total += row[i] * row[i];
    return 1.0f / std::sqrt(total + in.problem.l2norm_eps);
}

// Decays of a chunk of one value head. Running sums are kept as an unevaluated sum of two floats: under strong gates
// they reach -1e4 per token, where one float no longer resolves the weak decays in between.
struct ChunkGates {
    float *high, *low;     // [C] running sum of g
    float* decay;          // [C] exp(gamma_i): from the chunk's start to token i
    float* rest;           // [C] exp(gamma_L - gamma_i): from token i to the chunk's end
    float* beta;           // [C]
    float total = 1.0f;    // exp(gamma_L)
    bool constant = true;  // no decay at all in this chunk

    // Rows n..padded-1 repeat the last running sum and have beta 0.
    HWY_INLINE void fill(const Inputs& in, const Span& span, std::int64_t first, std::size_t n, std::size_t padded,
                         std::int32_t head) {
        double gamma = 0.0;
        constant = true;
        for (std::size_t i = 0; i < padded; ++i) {
            if (i < n) {
                const double g = log_decay(in, span, first + static_cast<std::int64_t>(i), head);
                constant = constant && g == 0.0;
                gamma += g;
            }
            high[i] = static_cast<float>(gamma);
            low[i] = static_cast<float>(gamma - high[i]);
            beta[i] = i < n ? beta_of(in, span, first + static_cast<std::int64_t>(i), head) : 0.0f;
        }
        if (constant) {
            cpu::HWY_NAMESPACE::fill(decay, padded, 1.0f);
            cpu::HWY_NAMESPACE::fill(rest, padded, 1.0f);
            total = 1.0f;
            return;
        }
        const FloatTag d;
        const auto end_high = hn::Set(d, high[padded - 1]), end_low = hn::Set(d, low[padded - 1]);
        for (std::size_t i = 0; i < padded; i += lanes()) {
            const auto h = hn::Load(d, high + i), l = hn::Load(d, low + i);
            hn::Store(hn::Exp(d, hn::Add(h, l)), d, decay + i);
            hn::Store(hn::Exp(d, hn::Add(hn::Sub(end_high, h), hn::Sub(end_low, l))), d, rest + i);
        }
        total = decay[padded - 1];
    }

    // exp(gamma_i - gamma_j) for i in [i0, i0 + lanes), selected (never multiplied) to zero where i < j.
    HWY_INLINE FloatVec between(std::size_t i0, std::size_t j) const {
        const FloatTag d;
        const auto inside = hn::Ge(hn::Iota(d, static_cast<float>(i0)), hn::Set(d, static_cast<float>(j)));
        if (constant) return hn::IfThenElseZero(inside, hn::Set(d, 1.0f));
        const auto dh = hn::Sub(hn::LoadU(d, high + i0), hn::Set(d, high[j]));
        const auto dl = hn::Sub(hn::LoadU(d, low + i0), hn::Set(d, low[j]));
        return hn::IfThenElseZero(inside, hn::Exp(d, hn::Add(dh, dl)));
    }
};

}  // namespace HWY_NAMESPACE
}  // namespace flashqla::cpu
FQLA_END_TARGET

#endif  // toggled guard
