// What the rule implies without an oracle. With q, k, g and beta fixed, o and the final state are linear in (v, initial
// state); so is every gradient in (d_o, d_final_state); backward is the adjoint of that linear map; o scales with q;
// and a token does not look ahead. Random problems, fp32, on the best backend.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <random>
#include <vector>

#include "flashqla/flashqla.hpp"

namespace flashqla {
namespace {

using Floats = std::vector<float>;
constexpr double kTolerance = 2e-5;  // relative to the size of what is compared; the oracle tests allow 1e-5

class Scratch {
public:
    explicit Scratch(std::size_t bytes) : bytes_(bytes), data_(::operator new(bytes + 1, kAlignment)) {
        std::memset(data_, 0xff, bytes + 1);
    }
    ~Scratch() { ::operator delete(data_, kAlignment); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    Workspace get() const { return {data_, bytes_}; }

private:
    static constexpr std::align_val_t kAlignment{64};
    std::size_t bytes_;
    void* data_;
};

double dot(const Floats& a, const Floats& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    return sum;
}
double norm(const Floats& a) { return std::sqrt(dot(a, a)); }

Floats combine(float x, const Floats& a, float y, const Floats& b) {
    Floats c(a.size());
    for (std::size_t i = 0; i < a.size(); ++i) c[i] = x * a[i] + y * b[i];
    return c;
}

void expect_near(const Floats& found, const Floats& wanted, double size, const char* what, int seed) {
    EXPECT_LE(norm(combine(1, found, -1, wanted)), kTolerance * std::max(size, norm(wanted)) + 1e-30)
        << what << ", seed " << seed;
}

// A random problem with its inputs; every function below runs the library on it.
class World {
public:
    explicit World(int seed) : dice_(static_cast<std::uint64_t>(seed)) {
        p.batch = from(1, 2);
        p.tokens = from(1, 200);
        p.heads_k = static_cast<std::int32_t>(from(1, 2));
        p.heads_v = p.heads_k * static_cast<std::int32_t>(from(1, 3));
        p.dim_k = static_cast<std::int32_t>(from(1, 70));
        p.dim_v = static_cast<std::int32_t>(from(1, 70));
        p.io = DType::f32;
        p.for_backward = true;
        p.qk_l2norm = from(0, 1) == 1;
        p.grouping = from(0, 1) == 1 ? Grouping::tiled : Grouping::interleaved;
        p.state_layout = from(0, 1) == 1 ? StateLayout::vk : StateLayout::kv;
        PlanOptions options;
        options.threads = static_cast<std::int32_t>(from(1, 2));
        options.context_split = static_cast<std::int32_t>(from(0, 3));
        plan = check(Plan::create(p, {}, options));
        q = keys();
        k = keys();
        for (float& x : g = Floats(gates())) x = -std::abs(normal()) * 0.3f;
        for (float& x : beta = Floats(gates())) x = 0.5f + 0.4f * std::tanh(normal());
    }

    std::size_t gates() const { return count(p.batch * p.tokens * p.heads_v); }
    Floats values() { return draw(gates() * count(p.dim_v), 1.0f); }
    Floats states() { return draw(count(p.batch * p.heads_v) * count(p.dim_k) * count(p.dim_v), 0.3f); }
    Floats keys() {
        return draw(count(p.batch * p.tokens * p.heads_k) * count(p.dim_k),
                    1.0f / std::sqrt(static_cast<float>(p.dim_k)));
    }
    std::int64_t from(std::int64_t low, std::int64_t high) {
        return low + static_cast<std::int64_t>(dice_() % static_cast<std::uint64_t>(high - low + 1));
    }

    struct Outputs {
        Floats o, state;
    };
    Outputs run_forward(const Floats& v, const Floats& start) const {
        Outputs out{Floats(v.size(), NAN), Floats(start.size(), NAN)};
        ForwardArgs args;
        inputs(args, v, start);
        args.o = values_view(out.o);
        args.final_state = states_view(out.state);
        const Scratch scratch(plan.workspace_bytes(Pass::forward));
        check(forward(plan, args, scratch.get()));
        return out;
    }

    struct Gradients {
        Floats q, k, v, g, beta, start;
    };
    Gradients run_backward(const Floats& v, const Floats& start, const Floats& d_o, const Floats& d_state) const {
        Gradients d{Floats(q.size(), NAN), Floats(k.size(), NAN),    Floats(v.size(), NAN),
                    Floats(g.size(), NAN), Floats(beta.size(), NAN), Floats(start.size(), NAN)};
        BackwardArgs args;
        inputs(args, v, start);
        args.d_o = values_view(d_o);
        args.d_final_state = states_view(d_state);
        args.d_q = keys_view(d.q);
        args.d_k = keys_view(d.k);
        args.d_v = values_view(d.v);
        args.d_g = gates_view(d.g);
        args.d_beta = gates_view(d.beta);
        args.d_initial_state = states_view(d.start);
        const Scratch scratch(plan.workspace_bytes(Pass::backward));
        check(backward(plan, args, scratch.get()));
        return d;
    }

    Problem p;
    Plan plan;
    Floats q, k, g, beta;

private:
    static std::size_t count(std::int64_t n) { return static_cast<std::size_t>(n); }
    float normal() { return static_cast<float>(normal_(dice_)); }
    Floats draw(std::size_t n, float size) {
        Floats x(n);
        for (float& e : x) e = size * normal();
        return x;
    }
    TensorView keys_view(const Floats& x) const {
        return tensor(x.data(), DType::f32, {p.batch, p.tokens, p.heads_k, p.dim_k});
    }
    TensorView values_view(const Floats& x) const {
        return tensor(x.data(), DType::f32, {p.batch, p.tokens, p.heads_v, p.dim_v});
    }
    TensorView gates_view(const Floats& x) const {
        return tensor(x.data(), DType::f32, {p.batch, p.tokens, p.heads_v});
    }
    TensorView states_view(const Floats& x) const {
        return p.state_layout == StateLayout::kv ? tensor(x.data(), DType::f32, {p.batch, p.heads_v, p.dim_k, p.dim_v})
                                                 : tensor(x.data(), DType::f32, {p.batch, p.heads_v, p.dim_v, p.dim_k});
    }
    template <class Args>
    void inputs(Args& args, const Floats& v, const Floats& start) const {
        args.q = keys_view(q);
        args.k = keys_view(k);
        args.v = values_view(v);
        args.g = gates_view(g);
        args.beta = gates_view(beta);
        args.initial_state = states_view(start);
    }

    std::mt19937_64 dice_;
    std::normal_distribution<double> normal_;
};

constexpr int kWorlds = 60;

TEST(Algebra, ForwardIsLinearInValuesAndState) {
    for (int seed = 0; seed < kWorlds; ++seed) {
        World w(seed);
        const Floats v1 = w.values(), v2 = w.values(), s1 = w.states(), s2 = w.states();
        const auto a = w.run_forward(v1, s1), b = w.run_forward(v2, s2);
        const auto both = w.run_forward(combine(2, v1, -1, v2), combine(2, s1, -1, s2));
        expect_near(both.o, combine(2, a.o, -1, b.o), 2 * norm(a.o) + norm(b.o), "o", seed);
        expect_near(both.state, combine(2, a.state, -1, b.state), 2 * norm(a.state) + norm(b.state), "state", seed);
    }
}

TEST(Algebra, GradientsAreLinearInTheIncomingOnes) {
    for (int seed = 0; seed < kWorlds; ++seed) {
        World w(seed);
        const Floats v = w.values(), s = w.states(), o1 = w.values(), o2 = w.values(), s1 = w.states(), s2 = w.states();
        const auto a = w.run_backward(v, s, o1, s1), b = w.run_backward(v, s, o2, s2);
        const auto both = w.run_backward(v, s, combine(2, o1, -1, o2), combine(2, s1, -1, s2));
        const struct {
            const char* name;
            const Floats &a, &b, &both;
        } outputs[] = {{"d_q", a.q, b.q, both.q},
                       {"d_k", a.k, b.k, both.k},
                       {"d_v", a.v, b.v, both.v},
                       {"d_g", a.g, b.g, both.g},
                       {"d_beta", a.beta, b.beta, both.beta},
                       {"d_initial_state", a.start, b.start, both.start}};
        for (const auto& x : outputs) {
            // A head size of 1 that is normalised has no gradient but rounding; its scale is that of the others.
            const double size = 2 * norm(x.a) + norm(x.b) + 1e-2 * norm(o1);
            expect_near(x.both, combine(2, x.a, -1, x.b), size, x.name, seed);
        }
    }
}

TEST(Algebra, BackwardIsTheAdjointOfForward) {
    for (int seed = 0; seed < kWorlds; ++seed) {
        World w(seed);
        const Floats v = w.values(), s = w.states(), d_o = w.values(), d_state = w.states();
        const auto out = w.run_forward(v, s);
        const auto d = w.run_backward(v, s, d_o, d_state);
        const double there = dot(d_o, out.o) + dot(d_state, out.state), back = dot(d.v, v) + dot(d.start, s);
        const double size = norm(d_o) * norm(out.o) + norm(d_state) * norm(out.state);
        EXPECT_NEAR(there, back, kTolerance * size) << "seed " << seed;

        // o is of degree 1 in q, or of degree 0 when q is normalised; the final state does not see q.
        const double along_q = dot(d.q, w.q), wanted = w.p.qk_l2norm ? 0.0 : dot(d_o, out.o);
        EXPECT_NEAR(along_q, wanted, 2 * kTolerance * norm(d_o) * norm(out.o)) << "seed " << seed;
    }
}

TEST(Algebra, TokensDoNotLookAhead) {
    for (int seed = 0; seed < kWorlds; ++seed) {
        World w(seed);
        const Floats v = w.values(), s = w.states();
        const auto before = w.run_forward(v, s);
        // The last tokens of the last batch row become something else altogether.
        const std::int64_t cut = w.from(0, w.p.tokens - 1);
        const auto changed = static_cast<std::size_t>(w.p.tokens - cut);
        const auto overwrite = [&](Floats& x, std::size_t row, float value) {
            std::fill(x.end() - static_cast<std::ptrdiff_t>(changed * row), x.end(), value);
        };
        Floats other = v;
        const auto heads_v = static_cast<std::size_t>(w.p.heads_v), dim_v = static_cast<std::size_t>(w.p.dim_v);
        const auto heads_k = static_cast<std::size_t>(w.p.heads_k), dim_k = static_cast<std::size_t>(w.p.dim_k);
        overwrite(other, heads_v * dim_v, 5.0f);
        overwrite(w.k, heads_k * dim_k, 0.1f);
        overwrite(w.q, heads_k * dim_k, -3.0f);
        overwrite(w.g, heads_v, -7.0f);
        overwrite(w.beta, heads_v, 0.99f);
        auto after = w.run_forward(other, s);
        const std::size_t kept = before.o.size() - changed * heads_v * dim_v;
        after.o.resize(kept);
        expect_near(after.o, Floats(before.o.begin(), before.o.begin() + static_cast<std::ptrdiff_t>(kept)), 0, "o",
                    seed);
    }
}

}  // namespace
}  // namespace flashqla
