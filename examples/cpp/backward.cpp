// Training: the gradients of a loss, checked against a difference of two losses. The loss is <w, o>, so d_o = w.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <flashqla/flashqla.hpp>
#include <random>
#include <vector>

namespace fq = flashqla;

namespace {

struct alignas(64) Line {
    std::byte bytes[64];
};

constexpr fq::DType kF32 = fq::DType::f32;
constexpr std::int64_t kTokens = 150, kHeadsK = 1, kHeadsV = 2, kDim = 32;

std::vector<float> normal(std::size_t count, float scale, std::mt19937& random) {
    std::normal_distribution<float> draw(0.0f, scale);
    std::vector<float> x(count);
    std::generate(x.begin(), x.end(), [&] { return draw(random); });
    return x;
}

std::vector<Line> scratch_for(const fq::Plan& plan, fq::Pass pass) {
    return std::vector<Line>(plan.workspace_bytes(pass) / sizeof(Line));
}
fq::Workspace workspace(std::vector<Line>& scratch) { return {scratch.data(), scratch.size() * sizeof(Line)}; }

}  // namespace

int main() {
    // The layer as a model has it: raw gates, beta as a logit, keys and queries normalised inside.
    fq::Problem p;
    p.tokens = kTokens, p.heads_k = kHeadsK, p.heads_v = kHeadsV, p.dim_k = kDim, p.dim_v = kDim;
    p.io = kF32;
    p.gate = fq::Gate::raw;
    p.beta_mode = fq::BetaMode::logit;
    p.qk_l2norm = true;
    p.for_backward = true;
    const fq::Plan plan = fq::check(fq::Plan::create(p));

    std::mt19937 random(3);
    const auto keys = static_cast<std::size_t>(kTokens * kHeadsK * kDim);
    const auto values = static_cast<std::size_t>(kTokens * kHeadsV * kDim);
    const auto gates = static_cast<std::size_t>(kTokens * kHeadsV);
    const auto q = normal(keys, 1, random), k = normal(keys, 1, random), v = normal(values, 1, random);
    const auto a = normal(gates, 1, random), b = normal(gates, 1, random), w = normal(values, 1, random);
    std::vector<float> A_log = {0.0f, -1.0f}, o(values);
    const std::vector<float> dt_bias = {0.5f, -0.5f};

    fq::ForwardArgs args;
    args.q = fq::tensor(q.data(), kF32, {1, kTokens, kHeadsK, kDim});
    args.k = fq::tensor(k.data(), kF32, {1, kTokens, kHeadsK, kDim});
    args.v = fq::tensor(v.data(), kF32, {1, kTokens, kHeadsV, kDim});
    args.g = fq::tensor(a.data(), kF32, {1, kTokens, kHeadsV});
    args.beta = fq::tensor(b.data(), kF32, {1, kTokens, kHeadsV});
    args.A_log = fq::tensor(A_log.data(), kF32, {kHeadsV});
    args.dt_bias = fq::tensor(dt_bias.data(), kF32, {kHeadsV});
    args.o = fq::tensor(o.data(), kF32, {1, kTokens, kHeadsV, kDim});
    std::vector<Line> scratch = scratch_for(plan, fq::Pass::forward);
    const auto loss = [&] {
        fq::check(fq::forward(plan, args, workspace(scratch)));
        double sum = 0.0;
        for (std::size_t i = 0; i < o.size(); ++i) sum += double(w[i]) * o[i];
        return sum;
    };

    // Only what is wanted is given; the forward pass leaves nothing behind for the backward pass.
    std::vector<float> d_q(keys), d_A_log(kHeadsV);
    fq::BackwardArgs back;
    back.q = args.q, back.k = args.k, back.v = args.v, back.g = args.g, back.beta = args.beta;
    back.A_log = args.A_log, back.dt_bias = args.dt_bias;
    back.d_o = fq::tensor(w.data(), kF32, {1, kTokens, kHeadsV, kDim});
    back.d_q = fq::tensor(d_q.data(), kF32, {1, kTokens, kHeadsK, kDim});
    back.d_A_log = fq::tensor(d_A_log.data(), kF32, {kHeadsV});
    std::vector<Line> back_scratch = scratch_for(plan, fq::Pass::backward);
    fq::check(fq::backward(plan, back, workspace(back_scratch)));

    bool good = true;
    for (std::size_t h = 0; h < A_log.size(); ++h) {
        const float at = A_log[h], step = 0.01f;
        A_log[h] = at + step;
        const double above = loss();
        A_log[h] = at - step;
        const double slope = (above - loss()) / (2 * step);
        A_log[h] = at;
        std::printf("d loss / d A_log[%d] = %.5f, by differences %.5f\n", static_cast<int>(h), d_A_log[h], slope);
        good = good && std::abs(slope - d_A_log[h]) < 1e-2 * std::abs(slope) + 1e-3;
    }
    return good ? 0 : 1;
}
