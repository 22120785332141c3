// A small GDN layer whose tensors are contiguous doubles, and the calls that point at them. Calls go straight to the
// oracle, so results are seen before any output dtype rounds them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "reference/recurrence.hpp"
#include "reference/reference.hpp"

namespace flashqla::test {

using reference::kF64;
using Doubles = std::vector<double>;
using Integers = std::vector<std::int64_t>;

inline TokenRef token_ref(void* data, DType dtype, std::int64_t tokens, std::int64_t heads, std::int64_t size) {
    return {data, dtype, tokens * heads * size, heads * size, size};
}
inline TokenRef token_ref(Doubles& x, std::int64_t tokens, std::int64_t heads, std::int64_t size) {
    return x.empty() ? TokenRef{} : token_ref(x.data(), kF64, tokens, heads, size);
}

// [rows, Hv, ..], or [rows, steps, Hv, ..] with steps > 0.
inline StateRef state_ref(void* data, DType dtype, const Problem& p, std::int64_t rows, std::int64_t steps = 0) {
    const std::int64_t K = p.dim_k, V = p.dim_v, H = p.heads_v;
    StateRef ref{data, dtype, rows, H * K * V * std::max<std::int64_t>(steps, 1), K * V, V, 1, 0};
    if (p.state_layout == StateLayout::vk) {
        ref.k = 1;
        ref.v = K;
    }
    if (steps > 0) ref.step = H * K * V;
    return ref;
}
inline StateRef state_ref(Doubles& x, const Problem& p, std::int64_t steps = 0) {
    if (x.empty()) return {};
    const std::int64_t row = p.heads_v * p.dim_k * p.dim_v * std::max<std::int64_t>(steps, 1);
    return state_ref(x.data(), kF64, p, static_cast<std::int64_t>(x.size()) / row, steps);
}

inline IndexRef index_ref(const Integers& x, std::int64_t columns = 1) {
    if (x.empty()) return {};
    return {x.data(), DType::i64, static_cast<std::int64_t>(x.size()) / columns, columns, columns, 1};
}
inline HeadRef head_ref(Doubles& x) { return x.empty() ? HeadRef{} : HeadRef{x.data(), kF64, 1}; }

// Plans the pass and runs it in a workspace full of NaN with a guard behind it.
template <class Call>
void run_oracle(const Call& call, Pass pass) {
    const auto plan = kReferenceBackend.plan({call.problem, {}, {}, pass});
    const std::size_t bytes = plan->workspace().bytes(), guard = 256;
    std::vector<double> memory((bytes + guard) / sizeof(double) + 8);
    std::memset(memory.data(), 0xff, memory.size() * sizeof(double));
    auto* workspace = reinterpret_cast<std::byte*>(memory.data());
    const Status status = plan->run(call, workspace, {});
    ASSERT_TRUE(status.ok()) << status.message();
    for (std::size_t i = bytes; i < bytes + guard; ++i)
        ASSERT_EQ(workspace[i], std::byte{0xff}) << "past the workspace";
}

// max |x - y| over max |y|: the error of a tensor in units of its largest element.
inline double relative_error(const Doubles& x, const Doubles& y) {
    EXPECT_EQ(x.size(), y.size());
    double error = 0.0, size = 1e-300;
    for (std::size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
        if (!std::isfinite(x[i])) return INFINITY;
        error = std::max(error, std::abs(x[i] - y[i]));
        size = std::max(size, std::abs(y[i]));
    }
    return error / size;
}

struct Random {
    std::mt19937_64 engine;
    explicit Random(std::uint64_t seed) : engine(seed) {}
    double uniform(double low, double high) { return std::uniform_real_distribution<double>(low, high)(engine); }
    double normal() { return std::normal_distribution<double>()(engine); }
    Doubles normals(std::int64_t count) {
        Doubles x(static_cast<std::size_t>(count));
        for (double& value : x) value = normal();
        return x;
    }
    Doubles uniforms(std::int64_t count, double low, double high) {
        Doubles x(static_cast<std::size_t>(count));
        for (double& value : x) value = uniform(low, high);
        return x;
    }
};

struct Layer {
    Problem p;
    std::int64_t count = 0;  // N
    Integers cu;             // empty: fixed length
    Doubles q, k, v, g, beta, A_log, dt_bias, initial_state;
    Doubles o, final_state;
    Doubles d_o, d_final_state;
    Doubles d_q, d_k, d_v, d_g, d_beta, d_A_log, d_dt_bias, d_initial_state;

    // lengths empty: batch x tokens of the problem; otherwise packed, and p.tokens may exceed their sum.
    explicit Layer(Problem problem, const Integers& lengths = {}, std::uint64_t seed = 1, bool with_beta = true)
        : p(problem) {
        Random random(seed);
        if (p.scale == 0.0f) p.scale = 1.0f / std::sqrt(static_cast<float>(p.dim_k));
        count = p.batch;
        if (!lengths.empty()) {
            count = p.sequences = static_cast<std::int64_t>(lengths.size());
            cu.assign(lengths.size() + 1, 0);
            std::partial_sum(lengths.begin(), lengths.end(), cu.begin() + 1);
            p.tokens = std::max(p.tokens, cu.back());
        }
        const std::int64_t rows = p.batch * p.tokens;
        q = random.normals(rows * p.heads_k * p.dim_k);
        k = random.normals(rows * p.heads_k * p.dim_k);
        v = random.normals(rows * p.heads_v * p.dim_v);
        // Keys of about unit length keep the recurrence a contraction, with or without l2norm.
        for (double& x : k) x /= std::sqrt(static_cast<double>(p.dim_k));
        if (p.gate == Gate::log) g = random.uniforms(rows * p.heads_v, -1.5, 0.0);
        if (p.gate == Gate::raw) {
            g = random.normals(rows * p.heads_v);
            A_log = random.uniforms(p.heads_v, -2.0, 0.5);
            dt_bias = random.normals(p.heads_v);
        }
        if (with_beta) {
            beta = p.beta_mode == BetaMode::logit ? random.normals(rows * p.heads_v)
                                                  : random.uniforms(rows * p.heads_v, 0.1, 0.9);
        }
        initial_state = random.normals(states());
        d_o = random.normals(rows * p.heads_v * p.dim_v);
        d_final_state = random.normals(states());
        o.resize(v.size());
        final_state.resize(initial_state.size());
    }

    std::int64_t states() const { return count * p.heads_v * p.dim_k * p.dim_v; }
    std::int64_t length(std::int64_t n) const { return cu.empty() ? p.tokens : cu[n + 1] - cu[n]; }
    std::int64_t first(std::int64_t n) const { return cu.empty() ? n * p.tokens : cu[n]; }  // row of [B*T]

    void fill_inputs(Inputs& in) {
        const std::int64_t T = p.tokens;
        in.problem = p;
        in.count = count;
        in.q = token_ref(q, T, p.heads_k, p.dim_k);
        in.k = token_ref(k, T, p.heads_k, p.dim_k);
        in.v = token_ref(v, T, p.heads_v, p.dim_v);
        in.g = token_ref(g, T, p.heads_v, 1);
        in.beta = token_ref(beta, T, p.heads_v, 1);
        in.A_log = head_ref(A_log);
        in.dt_bias = head_ref(dt_bias);
        in.cu_seqlens = index_ref(cu);
    }

    ForwardCall forward_call() {
        ForwardCall call;
        fill_inputs(call);
        call.initial_state = state_ref(initial_state, p);
        call.final_state = state_ref(final_state, p);
        call.o = token_ref(o, p.tokens, p.heads_v, p.dim_v);
        return call;
    }
    void forward() { run_oracle(forward_call(), Pass::forward); }

    BackwardCall backward_call() {
        for (auto [gradient, input] : {std::pair{&d_q, &q},
                                       {&d_k, &k},
                                       {&d_v, &v},
                                       {&d_g, &g},
                                       {&d_beta, &beta},
                                       {&d_A_log, &A_log},
                                       {&d_dt_bias, &dt_bias}}) {
            gradient->assign(input->size(), NAN);
        }
        d_initial_state.assign(static_cast<std::size_t>(states()), NAN);
        BackwardCall call;
        fill_inputs(call);
        call.initial_state = state_ref(initial_state, p);
        call.d_final_state = state_ref(d_final_state, p);
        call.d_initial_state = state_ref(d_initial_state, p);
        call.d_o = token_ref(d_o, p.tokens, p.heads_v, p.dim_v);
        call.d_q = token_ref(d_q, p.tokens, p.heads_k, p.dim_k);
        call.d_k = token_ref(d_k, p.tokens, p.heads_k, p.dim_k);
        call.d_v = token_ref(d_v, p.tokens, p.heads_v, p.dim_v);
        call.d_g = token_ref(d_g, p.tokens, p.heads_v, 1);
        call.d_beta = token_ref(d_beta, p.tokens, p.heads_v, 1);
        call.d_A_log = head_ref(d_A_log);
        call.d_dt_bias = head_ref(d_dt_bias);
        return call;
    }
    void backward() { run_oracle(backward_call(), Pass::backward); }

    // <d_o, o> + <d_final_state, final_state>, the number whose gradient backward() is.
    double loss() {
        forward();
        return std::inner_product(o.begin(), o.end(), d_o.begin(), 0.0) +
               std::inner_product(final_state.begin(), final_state.end(), d_final_state.begin(), 0.0);
    }
};

inline Problem small_problem(std::int64_t tokens, std::int32_t heads_k, std::int32_t heads_v, std::int32_t dim_k,
                             std::int32_t dim_v) {
    Problem p;
    p.tokens = tokens;
    p.heads_k = heads_k;
    p.heads_v = heads_v;
    p.dim_k = dim_k;
    p.dim_v = dim_v;
    p.io = p.out = kF64;
    return p;
}

// Rows of one sequence as a layer of its own, with the same heads.
inline Layer alone(const Layer& packed, std::int64_t n, const Doubles& state) {
    Problem p = packed.p;
    p.batch = 1;
    p.sequences = 0;
    p.tokens = packed.length(n);
    Layer layer(p);
    const auto take = [&](const Doubles& from, Doubles& to) {
        const std::int64_t row = static_cast<std::int64_t>(from.size()) / (packed.p.batch * packed.p.tokens);
        to.assign(from.begin() + packed.first(n) * row, from.begin() + (packed.first(n) + p.tokens) * row);
    };
    take(packed.q, layer.q);
    take(packed.k, layer.k);
    take(packed.v, layer.v);
    take(packed.g, layer.g);
    take(packed.beta, layer.beta);
    layer.A_log = packed.A_log;
    layer.dt_bias = packed.dt_bias;
    layer.initial_state = state;
    layer.forward();
    return layer;
}

inline std::int64_t state_size(const Problem& p) { return std::int64_t{p.heads_v} * p.dim_k * p.dim_v; }
inline Doubles row_of(const Doubles& x, std::int64_t row, std::int64_t size) {
    return {x.begin() + row * size, x.begin() + (row + 1) * size};
}
inline Doubles output_of(const Layer& layer, std::int64_t n) {
    const std::int64_t row = std::int64_t{layer.p.heads_v} * layer.p.dim_v;
    return {layer.o.begin() + layer.first(n) * row, layer.o.begin() + (layer.first(n) + layer.length(n)) * row};
}
inline bool same_bits(const Doubles& x, const Doubles& y) {
    return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(double)) == 0);
}
inline bool all_zero(const Doubles& x) {
    return std::all_of(x.begin(), x.end(), [](double value) { return value == 0.0; });
}

// A pool between two rows of canaries; row r of the pool is row r + 1 of the memory.
struct GuardedPool {
    std::int64_t size, slots;
    Doubles memory, before;

    GuardedPool(const Problem& p, std::int64_t count) : size(state_size(p)), slots(count) {
        memory = Random(77).normals((slots + 2) * size);
        std::fill_n(memory.begin(), size, NAN);
        std::fill_n(memory.end() - size, size, NAN);
        before = memory;
    }
    StateRef ref(const Problem& p) { return state_ref(memory.data() + size, kF64, p, slots); }
    Doubles slot(std::int64_t s) const { return row_of(memory, s + 1, size); }
    Doubles slot_before(std::int64_t s) const { return row_of(before, s + 1, size); }
    // Everything but the listed slots has kept its bits.
    void expect_only(const Integers& written) const {
        for (std::int64_t s = -1; s <= slots; ++s) {
            if (std::find(written.begin(), written.end(), s) != written.end()) continue;
            EXPECT_TRUE(same_bits(slot(s), slot_before(s))) << "slot " << s;
        }
    }
};

}  // namespace flashqla::test
