// Serving: users share a pool of states. Prompts of different lengths are packed into one prefill call that leaves each
// user's state in a slot; decode then moves a batch of users one token on, in place. The result equals one longer
// prefill.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <flashqla/flashqla.hpp>
#include <random>
#include <vector>

namespace fq = flashqla;

namespace {

struct alignas(64) Line {
    std::byte bytes[64];
};

constexpr std::int64_t kHeadsK = 2, kHeadsV = 4, kDim = 64, kSlots = 8;
constexpr std::int64_t kStateSize = kHeadsV * kDim * kDim;

// Rows of q, k, v, g and beta of one token after another.
struct Tokens {
    std::int64_t count;
    std::vector<float> q, k, v, g, beta, o;

    explicit Tokens(std::int64_t n)
        : count(n),
          q(n * kHeadsK * kDim),
          k(q.size()),
          v(n * kHeadsV * kDim),
          g(n * kHeadsV),
          beta(g.size()),
          o(v.size()) {}

    void draw(std::mt19937& random) {
        std::normal_distribution<float> normal;
        std::uniform_real_distribution<float> uniform;
        for (auto* x : {&q, &k, &v}) std::generate(x->begin(), x->end(), [&] { return normal(random); });
        for (float& x : g) x = -uniform(random);
        for (float& x : beta) x = uniform(random);
    }

    // Copies token `from` of `other` to token `to`.
    void take(std::int64_t to, const Tokens& other, std::int64_t from) {
        const auto copy = [&](const std::vector<float>& source, std::vector<float>& target) {
            const auto width = static_cast<std::int64_t>(source.size()) / other.count;
            std::copy_n(source.begin() + from * width, width, target.begin() + to * width);
        };
        copy(other.q, q), copy(other.k, k), copy(other.v, v), copy(other.g, g), copy(other.beta, beta);
    }

    // Forward packs tokens of all users into one row [1,T]; decode has a row for each user [N,1].
    template <class Args>
    void give(Args& args, std::int64_t B, std::int64_t T) const {
        constexpr fq::DType f32 = fq::DType::f32;
        args.q = fq::tensor(q.data(), f32, {B, T, kHeadsK, kDim});
        args.k = fq::tensor(k.data(), f32, {B, T, kHeadsK, kDim});
        args.v = fq::tensor(v.data(), f32, {B, T, kHeadsV, kDim});
        args.g = fq::tensor(g.data(), f32, {B, T, kHeadsV});
        args.beta = fq::tensor(beta.data(), f32, {B, T, kHeadsV});
        args.o = fq::tensor(o.data(), f32, {B, T, kHeadsV, kDim});
    }
};

fq::Problem layer() {
    fq::Problem p;
    p.heads_k = kHeadsK, p.heads_v = kHeadsV, p.dim_k = kDim, p.dim_v = kDim;
    p.io = fq::DType::f32;
    p.qk_l2norm = true;
    return p;
}

std::vector<Line> scratch_for(const fq::Plan& plan, fq::Pass pass) {
    return std::vector<Line>(plan.workspace_bytes(pass) / sizeof(Line));
}
fq::Workspace workspace(std::vector<Line>& scratch) { return {scratch.data(), scratch.size() * sizeof(Line)}; }

// Runs packed sequences from zero states into slots of the pool.
void prefill(const Tokens& tokens, const std::vector<std::int32_t>& offsets, const std::vector<std::int32_t>& slots,
             const fq::TensorView& pool) {
    const auto N = static_cast<std::int64_t>(slots.size());
    fq::Problem p = layer();
    p.tokens = tokens.count;
    p.sequences = N;
    const fq::Plan plan = fq::check(fq::Plan::create(p));
    std::vector<Line> scratch = scratch_for(plan, fq::Pass::forward);
    fq::ForwardArgs args;
    tokens.give(args, 1, tokens.count);
    args.cu_seqlens = fq::tensor(offsets.data(), fq::DType::i32, {N + 1});
    args.final_state = pool;
    args.state_indices_out = fq::tensor(slots.data(), fq::DType::i32, {N});
    fq::check(fq::forward(plan, args, workspace(scratch)));
}

}  // namespace

int main() {
    std::mt19937 random(1);
    const std::vector<std::int32_t> lengths = {100, 7, 33}, slots = {5, 0, 2};
    const std::int64_t users = 3, steps = 10;

    // Every user's whole text: the prompt, and what decode will see later.
    std::vector<Tokens> texts;
    std::vector<std::int32_t> offsets = {0};
    for (const std::int32_t length : lengths) {
        texts.emplace_back(length + steps).draw(random);
        offsets.push_back(offsets.back() + length);
    }

    std::vector<float> memory(kSlots * kStateSize);
    const fq::TensorView pool = fq::tensor(memory.data(), fq::DType::f32, {kSlots, kHeadsV, kDim, kDim});
    Tokens prompts(offsets.back());
    for (std::int64_t n = 0; n < users; ++n)
        for (std::int64_t t = 0; t < lengths[n]; ++t) prompts.take(offsets[n] + t, texts[n], t);
    prefill(prompts, offsets, slots, pool);

    // One plan serves every step. A fourth row is padding: slot -1 is nobody's, its output is zero.
    const std::int64_t rows = users + 1;
    std::vector<std::int32_t> indices = slots;
    indices.push_back(-1);
    fq::Problem p = layer();
    p.batch = rows;
    p.tokens = 1;
    const fq::Plan plan = fq::check(fq::Plan::create(p));
    std::vector<Line> scratch = scratch_for(plan, fq::Pass::decode);
    Tokens step(rows);
    fq::DecodeArgs args;
    step.give(args, rows, 1);
    args.state = pool;
    args.state_indices = fq::tensor(indices.data(), fq::DType::i32, {rows});
    for (std::int64_t t = 0; t < steps; ++t) {
        for (std::int64_t n = 0; n < users; ++n) step.take(n, texts[n], lengths[n] + t);
        fq::check(fq::decode(plan, args, workspace(scratch)));
    }

    // The same texts in one piece, into another pool.
    Tokens all(offsets.back() + users * steps);
    std::vector<std::int32_t> all_offsets = {0};
    for (std::int64_t n = 0; n < users; ++n) {
        for (std::int64_t t = 0; t < texts[n].count; ++t) all.take(all_offsets[n] + t, texts[n], t);
        all_offsets.push_back(all_offsets[n] + static_cast<std::int32_t>(texts[n].count));
    }
    std::vector<float> expected(memory.size());
    prefill(all, all_offsets, slots, fq::tensor(expected.data(), fq::DType::f32, {kSlots, kHeadsV, kDim, kDim}));

    float worst = 0.0f, padding = 0.0f;
    for (std::size_t i = 0; i < memory.size(); ++i) worst = std::max(worst, std::abs(memory[i] - expected[i]));
    for (std::int64_t n = 0; n < users; ++n) {
        const std::int64_t last = all_offsets[n + 1] - 1, width = kHeadsV * kDim;
        for (std::int64_t i = 0; i < width; ++i)
            worst = std::max(worst, std::abs(step.o[n * width + i] - all.o[last * width + i]));
    }
    for (std::size_t i = users * kHeadsV * kDim; i < step.o.size(); ++i)
        padding = std::max(padding, std::abs(step.o[i]));
    std::printf("prefill and %d decode steps against one prefill: largest difference %.1e; padding row %g\n",
                static_cast<int>(steps), worst, padding);
    return worst < 1e-5f && padding == 0.0f ? 0 : 1;
}
