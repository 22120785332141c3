// The arguments that forward, backward and decode share, under the same names in all three.
#pragma once

#include "api/checks.hpp"
#include "api/problem.hpp"
#include "api/slots.hpp"

namespace flashqla {

// The letters of the shapes in flashqla.hpp.
struct Sizes {
    std::int64_t B, T, N, Hk, Hv, K, V;
    explicit Sizes(const Problem& p) noexcept
        : B(p.batch), T(p.tokens), N(sequence_count(p)), Hk(p.heads_k), Hv(p.heads_v), K(p.dim_k), V(p.dim_v) {}
};

template <class Args>
void check_inputs(Checks& checks, const Args& args, Inputs& in) {
    const Problem& p = checks.plan().problem;
    const Sizes n(p);
    in.problem = p;
    in.count = n.N;

    in.q = checks.tokens("q", args.q, {n.B, n.T, n.Hk, n.K}, one_of(p.io), Role::input);
    in.k = checks.tokens("k", args.k, {n.B, n.T, n.Hk, n.K}, one_of(p.io), Role::input);
    in.v = checks.tokens("v", args.v, {n.B, n.T, n.Hv, n.V}, one_of(p.io), Role::input);
    if (p.gate == Gate::none) {
        checks.unused("g", args.g, "this plan has Gate::none");
    } else {
        in.g = checks.tokens("g", args.g, {n.B, n.T, n.Hv}, kFloats, Role::input);
    }
    in.beta = checks.tokens("beta", args.beta, {n.B, n.T, n.Hv}, kFloats, Role::input, Need::optional);
    if (p.gate == Gate::raw) {
        in.A_log = checks.heads("A_log", args.A_log, Role::input, Need::required);
        in.dt_bias = checks.heads("dt_bias", args.dt_bias, Role::input);
    } else {
        checks.unused("A_log", args.A_log, "only Gate::raw uses it");
        checks.unused("dt_bias", args.dt_bias, "only Gate::raw uses it");
    }
    if (packed(p)) {
        in.cu_seqlens = checks.indices("cu_seqlens", args.cu_seqlens, {n.N + 1}, kIntegers, Need::required);
        check_offsets(checks, in);
    } else {
        checks.unused("cu_seqlens", args.cu_seqlens, "this plan is for sequences of fixed length");
    }
}

}  // namespace flashqla
