#include <cstdio>
#include <flashqla/flashqla.hpp>
#include <vector>
namespace fq = flashqla;
struct alignas(64) Line {
    std::byte bytes[64];
};  // a workspace is aligned to 64 bytes

int main() {
    fq::Problem p;
    p.tokens = 1000, p.heads_k = 2, p.heads_v = 4, p.dim_k = 128, p.dim_v = 128;
    p.io = fq::DType::f32, p.qk_l2norm = true;
    const fq::Plan plan = fq::check(fq::Plan::create(p));
    const std::vector<float> q(1000 * 2 * 128, 1.0f), v(1000 * 4 * 128, 3.0f), g(1000 * 4, -0.5f);
    std::vector<float> o(v.size());
    std::vector<Line> scratch(plan.workspace_bytes(fq::Pass::forward) / sizeof(Line));
    fq::ForwardArgs args;
    args.q = args.k = fq::tensor(q.data(), fq::DType::f32, {1, 1000, 2, 128});
    args.v = fq::tensor(v.data(), fq::DType::f32, {1, 1000, 4, 128});
    args.g = fq::tensor(g.data(), fq::DType::f32, {1, 1000, 4});
    args.o = fq::tensor(o.data(), fq::DType::f32, {1, 1000, 4, 128});
    fq::check(fq::forward(plan, args, {scratch.data(), scratch.size() * sizeof(Line)}));
    std::printf("%.4f\n", o.back());  // v / sqrt(K) = 0.2652: every token has the same key, and beta is 1
}
