// Valid small calls of the public API, for tests that break one thing at a time.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "flashqla/flashqla.hpp"

namespace flashqla::test {

// 64-byte aligned scratch, poisoned.
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

inline void expect_error(const Status& status, Code code, const std::string& sentence) {
    EXPECT_EQ(static_cast<int>(status.code()), static_cast<int>(code));
    EXPECT_EQ(status.message(), sentence);
}
inline void expect_ok(const Status& status) { EXPECT_TRUE(status.ok()) << status.message(); }

// B 2, T 8, Hk 2, Hv 4, K 8, V 6, fp32, log gate.
inline Problem fixed_problem(std::int64_t tokens = 8) {
    Problem p;
    p.batch = 2;
    p.tokens = tokens;
    p.heads_k = 2;
    p.heads_v = 4;
    p.dim_k = 8;
    p.dim_v = 6;
    p.io = DType::f32;
    return p;
}

// Three sequences of 5, 0 and 9 tokens in 16 rows.
inline Problem packed_problem() {
    Problem p = fixed_problem(16);
    p.batch = 1;
    p.sequences = 3;
    return p;
}

inline std::int64_t rows_of(const Problem& p) { return p.sequences > 0 ? p.sequences : p.batch; }

// Memory for every argument of every pass, filled with small numbers that depend on the place only.
struct Memory {
    explicit Memory(const Problem& p)
        : B(p.batch), T(p.tokens), N(rows_of(p)), Hk(p.heads_k), Hv(p.heads_v), K(p.dim_k), V(p.dim_v) {
        fill(q, B * T * Hk * K);
        fill(k, B * T * Hk * K);
        fill(v, B * T * Hv * V);
        fill(o, B * T * Hv * V);
        fill(g, B * T * Hv, -1.0f);
        fill(beta, B * T * Hv);
        fill(A_log, Hv);
        fill(dt_bias, Hv);
        fill(initial, N * Hv * K * V);
        fill(final, N * Hv * K * V);
        fill(pool, slots * Hv * K * V);
        fill(steps, N * kMaxDecodeTokens * Hv * K * V);
    }

    TensorView keys(const std::vector<float>& x) const { return tensor(x.data(), DType::f32, {B, T, Hk, K}); }
    TensorView values(const std::vector<float>& x) const { return tensor(x.data(), DType::f32, {B, T, Hv, V}); }
    TensorView gates(const std::vector<float>& x) const { return tensor(x.data(), DType::f32, {B, T, Hv}); }
    TensorView heads(const std::vector<float>& x) const { return tensor(x.data(), DType::f32, {Hv}); }
    TensorView states(const std::vector<float>& x) const { return tensor(x.data(), DType::f32, {N, Hv, K, V}); }
    TensorView whole_pool() const { return tensor(pool.data(), DType::f32, {slots, Hv, K, V}); }
    TensorView all_steps(std::int64_t tokens) const { return tensor(steps.data(), DType::f32, {N, tokens, Hv, K, V}); }

    std::int64_t B, T, N, Hk, Hv, K, V, slots = 8;
    std::vector<float> q, k, v, o, g, beta, A_log, dt_bias, initial, final, pool, steps;

private:
    static void fill(std::vector<float>& x, std::int64_t count, float factor = 1.0f) {
        x.resize(static_cast<std::size_t>(count));
        for (std::size_t i = 0; i < x.size(); ++i) x[i] = factor * static_cast<float>((i * 37) % 11) / 16.0f;
    }
};

inline TensorView offsets(const std::vector<std::int32_t>& x) {
    return tensor(x.data(), DType::i32, {static_cast<std::int64_t>(x.size())});
}

// q, k, v, g, beta and cu_seqlens of any pass.
template <class Args>
void set_inputs(Args& args, const Problem& p, const Memory& m, const std::vector<std::int32_t>& cu_seqlens) {
    args.q = m.keys(m.q);
    args.k = m.keys(m.k);
    args.v = m.values(m.v);
    if (p.gate != Gate::none) args.g = m.gates(m.g);
    args.beta = m.gates(m.beta);
    if (p.gate == Gate::raw) {
        args.A_log = m.heads(m.A_log);
        args.dt_bias = m.heads(m.dt_bias);
    }
    if (p.sequences > 0) args.cu_seqlens = offsets(cu_seqlens);
}

// The oracle, so that these tests hold in every build.
inline PlanOptions on_reference() {
    PlanOptions options;
    options.backend = "reference";
    return options;
}

// Names of all backends of this build that run on the CPU, as these tests do.
inline std::vector<std::string> backend_list() {
    std::vector<std::string> names;
    std::string text = backend_names();
    for (std::size_t comma; (comma = text.find(", ")) != std::string::npos; text.erase(0, comma + 2)) {
        names.push_back(text.substr(0, comma));
    }
    names.push_back(text);
    std::erase_if(names, [](const std::string& name) { return name.starts_with("cuda"); });
    return names;
}

struct ForwardSetup {
    explicit ForwardSetup(const Problem& problem, const PlanOptions& options = on_reference())
        : p(problem),
          plan(check(Plan::create(problem, {}, options))),
          m(problem),
          scratch(plan.workspace_bytes(Pass::forward)) {
        set_inputs(args, p, m, cu_seqlens);
        args.o = m.values(m.o);
        args.initial_state = m.states(m.initial);
        args.final_state = m.states(m.final);
    }
    Status run() const { return forward(plan, args, scratch.get()); }
    void expect_invalid(const std::string& sentence) const {
        expect_error(run(), Code::invalid_argument, "flashqla::forward: " + sentence);
    }

    Problem p;
    Plan plan;
    Memory m;
    Scratch scratch;
    std::vector<std::int32_t> cu_seqlens = {0, 5, 5, 14};
    ForwardArgs args;
};

struct BackwardSetup {
    static Problem with_backward(Problem p) {
        p.for_backward = true;
        return p;
    }
    explicit BackwardSetup(const Problem& problem, const PlanOptions& options = on_reference())
        : p(with_backward(problem)),
          plan(check(Plan::create(p, {}, options))),
          m(p),
          d(p),
          scratch(plan.workspace_bytes(Pass::backward)) {
        set_inputs(args, p, m, cu_seqlens);
        args.initial_state = m.states(m.initial);
        args.d_o = m.values(m.o);
        args.d_final_state = m.states(m.final);
        args.d_q = d.keys(d.q);
        args.d_k = d.keys(d.k);
        args.d_v = d.values(d.v);
        if (p.gate != Gate::none) args.d_g = d.gates(d.g);
        args.d_beta = d.gates(d.beta);
        if (p.gate == Gate::raw) {
            args.d_A_log = d.heads(d.A_log);
            args.d_dt_bias = d.heads(d.dt_bias);
        }
        args.d_initial_state = d.states(d.initial);
    }
    Status run() const { return backward(plan, args, scratch.get()); }
    void expect_invalid(const std::string& sentence) const {
        expect_error(run(), Code::invalid_argument, "flashqla::backward: " + sentence);
    }

    Problem p;
    Plan plan;
    Memory m, d;
    Scratch scratch;
    std::vector<std::int32_t> cu_seqlens = {0, 5, 5, 14};
    BackwardArgs args;
};

struct DecodeSetup {
    explicit DecodeSetup(const Problem& problem, const PlanOptions& options = on_reference())
        : p(problem),
          plan(check(Plan::create(problem, {}, options))),
          m(problem),
          scratch(plan.workspace_bytes(Pass::decode)) {
        set_inputs(args, p, m, cu_seqlens);
        args.state = m.whole_pool();
        args.o = m.values(m.o);
    }
    Status run() const { return decode(plan, args, scratch.get()); }
    void expect_invalid(const std::string& sentence) const {
        expect_error(run(), Code::invalid_argument, "flashqla::decode: " + sentence);
    }

    Problem p;
    Plan plan;
    Memory m;
    Scratch scratch;
    std::vector<std::int32_t> cu_seqlens = {0, 5, 5, 14};
    DecodeArgs args;
};

}  // namespace flashqla::test
