// Speculative decoding: a draft of several tokens runs in one decode call that leaves the pool as it is and keeps the
// state after each token in a buffer. When the model has said how many tokens it accepts, commit() moves those states
// into the pool. The result equals a run of the accepted tokens alone.
#include <algorithm>
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

constexpr std::int64_t kUsers = 2, kDraft = 4, kHeads = 3, kK = 32, kV = 48, kSlots = 5;
constexpr std::int64_t kStateSize = kHeads * kK * kV;

struct Draft {
    std::vector<float> q, k, v, g;  // [users, draft, heads, ..]

    explicit Draft(std::mt19937& random)
        : q(kUsers * kDraft * kHeads * kK), k(q.size()), v(kUsers * kDraft * kHeads * kV), g(kUsers * kDraft * kHeads) {
        std::normal_distribution<float> normal;
        for (auto* x : {&q, &k, &v}) std::generate(x->begin(), x->end(), [&] { return normal(random); });
        std::generate(g.begin(), g.end(), [&] { return -std::abs(normal(random)); });
    }

    // Tokens [0, T) of users [n, n + B). Strides are free, so a part of a tensor needs no copy.
    template <class Args>
    void give(Args& args, std::int64_t n, std::int64_t B, std::int64_t T) const {
        constexpr fq::DType f32 = fq::DType::f32;
        const auto row = [&](const std::vector<float>& x, std::int64_t width) {
            const std::int64_t token = kHeads * width, user = kDraft * token;
            return fq::tensor(x.data() + n * user, f32, {B, T, kHeads, width}, {user, token, width, 1});
        };
        args.q = row(q, kK), args.k = row(k, kK), args.v = row(v, kV);
        args.g = fq::tensor(g.data() + n * kDraft * kHeads, f32, {B, T, kHeads}, {kDraft * kHeads, kHeads, 1});
    }
};

fq::Plan plan_for(std::int64_t B, std::int64_t T) {
    fq::Problem p;
    p.batch = B, p.tokens = T;
    p.heads_k = p.heads_v = kHeads, p.dim_k = kK, p.dim_v = kV;
    p.io = fq::DType::f32;
    p.qk_l2norm = true;
    p.state_layout = fq::StateLayout::vk;  // [slots, heads, V, K]
    return fq::check(fq::Plan::create(p));
}

fq::TensorView pool_of(std::vector<float>& memory) {
    return fq::tensor(memory.data(), fq::DType::f32, {kSlots, kHeads, kV, kK});
}

}  // namespace

int main() {
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    const Draft draft(random);
    std::vector<float> pool(kSlots * kStateSize);
    std::generate(pool.begin(), pool.end(), [&] { return normal(random); });
    const std::vector<float> before = pool;
    const std::int32_t slots[kUsers] = {3, 1}, accepted[kUsers] = {2, 4};

    const fq::Plan plan = plan_for(kUsers, kDraft);
    std::vector<Line> scratch(plan.workspace_bytes(fq::Pass::decode) / sizeof(Line));
    const fq::Workspace workspace{scratch.data(), scratch.size() * sizeof(Line)};
    std::vector<float> steps(kUsers * kDraft * kStateSize), o(draft.v.size());
    const fq::TensorView indices = fq::tensor(slots, fq::DType::i32, {kUsers});
    fq::DecodeArgs args;
    draft.give(args, 0, kUsers, kDraft);
    args.state = pool_of(pool);
    args.state_indices = indices;
    args.intermediate_states = fq::tensor(steps.data(), fq::DType::f32, {kUsers, kDraft, kHeads, kV, kK});
    args.commit_state = false;
    args.o = fq::tensor(o.data(), fq::DType::f32, {kUsers, kDraft, kHeads, kV});
    fq::check(fq::decode(plan, args, workspace));
    const bool untouched = pool == before;

    fq::CommitArgs commit;
    commit.state = pool_of(pool);
    commit.state_indices = indices;
    commit.intermediate_states = args.intermediate_states;
    commit.accepted = fq::tensor(accepted, fq::DType::i32, {kUsers});
    fq::check(fq::commit(plan, commit, workspace));

    // Only the accepted tokens, user by user, on the pool as it was.
    std::vector<float> expected = before;
    for (std::int64_t n = 0; n < kUsers; ++n) {
        const fq::Plan alone = plan_for(1, accepted[n]);
        std::vector<Line> space(alone.workspace_bytes(fq::Pass::decode) / sizeof(Line));
        fq::DecodeArgs one;
        draft.give(one, n, 1, accepted[n]);
        one.state = pool_of(expected);
        one.state_indices = fq::tensor(slots + n, fq::DType::i32, {1});
        one.o = fq::tensor(o.data(), fq::DType::f32, {1, accepted[n], kHeads, kV});
        fq::check(fq::decode(alone, one, {space.data(), space.size() * sizeof(Line)}));
    }
    std::printf("draft of %d tokens, accepted %d and %d: pool untouched before commit: %s; states equal: %s\n",
                static_cast<int>(kDraft), accepted[0], accepted[1], untouched ? "yes" : "no",
                pool == expected ? "yes" : "no");
    return untouched && pool == expected ? 0 : 1;
}
