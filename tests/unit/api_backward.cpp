// What backward() refuses, with its sentence, and what it accepts.
#include <cmath>

#include "api_setup.hpp"

namespace flashqla::test {
namespace {

Problem raw_problem() {
    Problem p = fixed_problem();
    p.gate = Gate::raw;
    return p;
}

TEST(ApiBackward, AcceptsTheSetups) {
    expect_ok(BackwardSetup(fixed_problem()).run());
    expect_ok(BackwardSetup(packed_problem()).run());
    expect_ok(BackwardSetup(raw_problem()).run());
}

TEST(ApiBackward, EveryOutputAndEitherGradientMayBeAbsent) {
    BackwardSetup s(raw_problem());
    s.args.d_o = {};
    expect_ok(s.run());
    s.args.d_final_state = s.args.initial_state = {};
    expect_ok(s.run());
    s.args.d_q = s.args.d_k = s.args.d_v = s.args.d_g = s.args.d_beta = {};
    s.args.d_A_log = s.args.d_dt_bias = s.args.d_initial_state = {};
    expect_ok(s.run());
}

TEST(ApiBackward, BadGradients) {
    BackwardSetup s(raw_problem());
    const BackwardArgs good = s.args;
    s.args.d_o = tensor(s.m.o.data(), DType::f32, {2, 8, 4, 8});
    s.expect_invalid("d_o has shape [2,8,4,8]; this plan needs [2,8,4,6]");
    s.args = good;
    s.args.d_q = s.d.values(s.d.v);
    s.expect_invalid("d_q has shape [2,8,4,6]; this plan needs [2,8,2,8]");
    s.args = good;
    s.args.d_k.dtype = DType::u8;
    s.expect_invalid("d_k has dtype u8; this plan needs f32 or f16 or bf16");
    s.args = good;
    s.args.d_v.data = nullptr;
    s.expect_invalid("d_v has null data and shape [2,8,4,6]; only a tensor without elements may be null");
    s.args = good;
    s.args.d_A_log = tensor(s.d.A_log.data(), DType::f32, {2});
    s.expect_invalid("d_A_log has shape [2]; this plan needs [4]");
    s.args = good;
    s.args.d_dt_bias.device.type = DeviceType::cuda;
    s.expect_invalid("d_dt_bias is on cuda:0; this plan runs on cpu:0");
    s.args = good;
    s.args.d_initial_state = s.d.whole_pool();
    s.expect_invalid("d_initial_state has shape [8,4,8,6]; this plan needs [2,4,8,6]");
    s.args = good;
    s.args.d_beta.stride[0] = 0;
    s.expect_invalid(
        "d_beta has stride 0 in dimension 0 of size 2; an output needs a place of its own for each element");
}

TEST(ApiBackward, GradientsOfWhatIsNotGiven) {
    BackwardSetup s(fixed_problem());
    const BackwardArgs good = s.args;
    s.args.beta = {};
    s.expect_invalid("d_beta is given, but beta is not");
    s.args = good;
    s.args.d_A_log = s.d.heads(s.d.A_log);
    s.expect_invalid("d_A_log is given, but A_log is not");
    s.args = good;
    s.args.d_dt_bias = s.d.heads(s.d.A_log);
    s.expect_invalid("d_dt_bias is given, but dt_bias is not");
    Problem none = fixed_problem();
    none.gate = Gate::none;
    BackwardSetup n(none);
    expect_ok(n.run());
    n.args.d_g = n.d.gates(n.d.g);
    n.expect_invalid("d_g is given, but g is not");
}

TEST(ApiBackward, Overlaps) {
    BackwardSetup s(fixed_problem());
    const BackwardArgs good = s.args;
    s.args.d_v = s.args.v;
    s.expect_invalid("output d_v overlaps input v");
    s.args = good;
    s.args.d_k = s.args.d_q;
    s.expect_invalid("output d_k overlaps output d_q");
    s.args = good;
    s.args.d_initial_state = s.args.d_final_state;
    s.expect_invalid("output d_initial_state overlaps input d_final_state");
}

TEST(ApiBackward, WorkspaceAndOffsets) {
    BackwardSetup s(packed_problem());
    const std::size_t needed = s.plan.workspace_bytes(Pass::backward);
    expect_error(backward(s.plan, s.args, {s.scratch.get().data, 64}), Code::workspace_too_small,
                 "flashqla::backward: workspace has 64 bytes; this plan needs " + std::to_string(needed));
    const std::vector<std::int32_t> falling = {0, 9, 5, 14};
    s.args.cu_seqlens = offsets(falling);
    s.expect_invalid("cu_seqlens[2] is 5 after 9; offsets must never decrease");
}

TEST(ApiBackward, EmptySequencesPassTheGradientThrough) {
    BackwardSetup s(packed_problem());
    const std::vector<std::int32_t> none = {0, 0, 0, 0};
    s.args.cu_seqlens = offsets(none);
    std::fill(s.d.q.begin(), s.d.q.end(), NAN);
    expect_ok(s.run());
    EXPECT_EQ(s.d.initial, s.m.final);
    EXPECT_EQ(s.d.q, std::vector<float>(s.d.q.size(), 0.0f));

    Problem p = raw_problem();
    p.tokens = 0;
    BackwardSetup t(p);
    expect_ok(t.run());
    EXPECT_EQ(t.d.initial, t.m.final);
    EXPECT_EQ(t.d.A_log, std::vector<float>(4, 0.0f));

    p.batch = 0;
    BackwardSetup u(p);
    expect_ok(u.run());
    EXPECT_EQ(u.d.dt_bias, std::vector<float>(4, 0.0f));
}

}  // namespace
}  // namespace flashqla::test
