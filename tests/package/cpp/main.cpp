// One token, one head, K = V = 2, no gate: with k = q = e1, beta = 1 and scale = 1, o = v.
#include <cstdio>
#include <flashqla/flashqla.hpp>
#include <new>

namespace fq = flashqla;

int main() {
    fq::Problem problem;
    problem.tokens = 1;
    problem.heads_k = problem.heads_v = 1;
    problem.dim_k = problem.dim_v = 2;
    problem.io = fq::DType::f32;
    problem.gate = fq::Gate::none;
    problem.scale = 1.0f;
    const fq::Plan plan = fq::check(fq::Plan::create(problem));

    const std::size_t bytes = plan.workspace_bytes(fq::Pass::forward);
    constexpr std::align_val_t kAlignment{64};
    void* scratch = ::operator new(bytes, kAlignment);
    const float q[2] = {1.0f, 0.0f}, v[2] = {3.0f, -5.0f};
    float o[2] = {};
    fq::ForwardArgs args;
    args.q = args.k = fq::tensor(q, fq::DType::f32, {1, 1, 1, 2});
    args.v = fq::tensor(v, fq::DType::f32, {1, 1, 1, 2});
    args.o = fq::tensor(o, fq::DType::f32, {1, 1, 1, 2});
    fq::check(fq::forward(plan, args, {scratch, bytes}));
    ::operator delete(scratch, kAlignment);

    std::printf("flashqla %s on %s: o = %g %g\n", fq::version(), plan.backend(fq::Pass::forward).data(), o[0], o[1]);
    return o[0] == 3.0f && o[1] == -5.0f ? 0 : 1;
}
