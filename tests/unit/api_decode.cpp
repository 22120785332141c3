// What decode() and commit() refuse, with its sentence, and what they accept.
#include <climits>

#include "api_setup.hpp"

namespace flashqla::test {
namespace {

using Ints = std::vector<std::int32_t>;

TensorView table(const Ints& x, std::int64_t columns) {
    return tensor(x.data(), DType::i32, {static_cast<std::int64_t>(x.size()) / columns, columns});
}

TEST(ApiDecode, AcceptsTheSetups) {
    expect_ok(DecodeSetup(fixed_problem(1)).run());
    expect_ok(DecodeSetup(fixed_problem(16)).run());
    expect_ok(DecodeSetup(packed_problem()).run());
}

TEST(ApiDecode, RequiredAndUnused) {
    const Ints two = {0, 1};
    DecodeSetup s(fixed_problem(2));
    const DecodeArgs good = s.args;
    s.args.state = {};
    s.expect_invalid("state is not given; this plan needs [>=2,4,8,6]");
    s.args = good;
    s.args.o = {};
    s.expect_invalid("o is not given; this plan needs [2,2,4,6]");
    s.args = good;
    s.args.num_accepted = offsets(two);
    s.expect_invalid("num_accepted is given, but state_indices is not of shape [N,S]");
    s.args = good;
    s.args.intermediate_indices = offsets(two);
    s.expect_invalid("intermediate_indices is given, but intermediate_states is not");
    s.args = good;
    s.args.parent_tokens = tensor(two.data(), DType::i32, {2, 2}, {0, 1});
    s.expect_invalid("parent_tokens is given, but intermediate_states is not");
    s.args = good;
    s.args.state_indices_out = offsets(two);
    expect_ok(s.run());
    s.args.commit_state = false;
    s.expect_invalid("state_indices_out is given, but commit_state is false");
    s.args = good;
    s.args.state = tensor(s.m.pool.data(), DType::f32, {1, 4, 8, 6});
    s.expect_invalid("state has shape [1,4,8,6]; this plan needs [>=2,4,8,6]");
}

TEST(ApiDecode, Slots) {
    DecodeSetup s(fixed_problem(1));
    const DecodeArgs good = s.args;
    const Ints beyond = {7, 8}, twice = {5, 5}, pads = {-1, -1}, fine = {7, 0}, crossed = {0, 7}, three = {1, 2, 3};
    s.args.state_indices = offsets(beyond);
    s.expect_invalid("state_indices sends row 1 to slot 8; state has 8 slots");
    s.args.state_indices = offsets(twice);
    s.expect_invalid("state_indices names slot 5 twice; what is written must be unique");
    s.args.commit_state = false;  // nothing is written
    expect_ok(s.run());
    s.args = good;
    s.args.state_indices = offsets(three);
    s.expect_invalid("state_indices has shape [3]; this plan needs [2]");
    s.args.state_indices = offsets(pads);
    expect_ok(s.run());
    s.args.state_indices = offsets(fine);
    expect_ok(s.run());
    s.args.state_indices_out = offsets(crossed);
    s.expect_invalid(
        "row 0 reads slot 7, which another row writes through state_indices_out; such a slot may have no "
        "other reader");
    s.args.state_indices_out = offsets(beyond);
    s.expect_invalid("state_indices_out sends row 1 to slot 8; state has 8 slots");
    s.args.state_indices_out = offsets(twice);
    s.expect_invalid("state_indices_out names slot 5 twice; what is written must be unique");
}

TEST(ApiDecode, ASlotForEachToken) {
    DecodeSetup s(fixed_problem(2));
    const DecodeArgs good = s.args;
    const Ints fine = {0, 1, 2, 3}, beyond = {0, 1, 2, 8}, twice = {0, 1, 2, 1}, within = {0, 0, 2, 3};
    s.args.state_indices = table(fine, 2);
    expect_ok(s.run());
    s.args.state_indices = table(beyond, 2);
    s.expect_invalid("state_indices sends row 1 to slot 8; state has 8 slots");
    s.args.state_indices = table(twice, 2);
    s.expect_invalid("state_indices names slot 1 twice; what is written must be unique");
    s.args.state_indices = table(within, 2);
    s.expect_invalid("state_indices names slot 0 twice; what is written must be unique");
    s.args.state_indices = tensor(fine.data(), DType::i32, {2, 1});
    s.expect_invalid("state_indices has shape [2,1]; this plan needs [2,>=2]");
    s.args.state_indices = table(fine, 2);
    s.args.state_indices_out = tensor(fine.data(), DType::i32, {2});
    s.expect_invalid("state_indices_out is given, but state_indices has a slot for each token");

    // Only the first T of S slots are written; the start may be any of the row's S.
    const Ints wide = {0, 1, 6, 2, 3, 6}, accepted = {3, 3}, other = {0, 1, 6, 6, 3, 2}, none = {0, 4};
    s.args = good;
    s.args.state_indices = table(wide, 3);
    s.args.num_accepted = offsets(accepted);
    expect_ok(s.run());
    s.args.state_indices = table(other, 3);
    s.expect_invalid(
        "row 0 reads slot 6, which another row writes through state_indices; such a slot may have no "
        "other reader");
    s.args.num_accepted = offsets(none);  // out of 1..S: padding rows
    expect_ok(s.run());
}

TEST(ApiDecode, PackedRows) {
    DecodeSetup s(packed_problem());
    Problem longer = packed_problem();
    longer.tokens = 40;
    DecodeSetup t(longer);
    const Ints long_row = {0, 5, 22, 30};
    t.args.cu_seqlens = offsets(long_row);
    t.expect_invalid("row 1 has 17 tokens; decode takes at most 16");

    const Ints slots = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7};
    s.args.state_indices = tensor(slots.data(), DType::i32, {3, 8});
    s.expect_invalid("row 2 has 9 tokens; state_indices has 8 slots for it");
    s.args.state_indices = tensor(slots.data(), DType::i32, {3, 1});
    s.expect_invalid("row 0 has 5 tokens; state_indices has 1 slots for it");
    s.args.state_indices = {};
    s.args.intermediate_states = s.m.all_steps(8);
    s.expect_invalid("row 2 has 9 tokens; intermediate_states has 8 places for it");
    s.args.intermediate_states = s.m.all_steps(9);
    expect_ok(s.run());
    s.args.commit_state = false;
    s.args.parent_tokens = tensor(slots.data(), DType::i32, {3, 8});
    s.expect_invalid("row 2 has 9 tokens; parent_tokens has 8 entries for it");
}

TEST(ApiDecode, IntermediateStates) {
    DecodeSetup s(fixed_problem(3));
    s.args.intermediate_states = s.m.all_steps(3);
    expect_ok(s.run());
    s.args.intermediate_states = s.m.all_steps(2);
    s.expect_invalid("intermediate_states has shape [2,2,4,8,6]; this plan needs [>=2,>=3,4,8,6]");
    s.args.intermediate_states = s.m.all_steps(5);
    const Ints beyond = {0, 2}, twice = {1, 1}, skipped = {-1, 1};
    s.args.intermediate_indices = offsets(beyond);
    s.expect_invalid("intermediate_indices[1] is 2; intermediate_states has 2 rows");
    s.args.intermediate_indices = offsets(twice);
    s.expect_invalid("intermediate_indices names row 1 twice; what is written must be unique");
    s.args.intermediate_indices = offsets(skipped);
    expect_ok(s.run());
}

TEST(ApiDecode, Trees) {
    DecodeSetup s(fixed_problem(3));
    s.args.intermediate_states = s.m.all_steps(3);
    const Ints tree = {-1, 0, 0, -1, -1, 1}, later = {-1, 0, 0, -1, 1, 1}, skipped = {-1, 1};
    s.args.parent_tokens = table(tree, 3);
    s.expect_invalid("parent_tokens is given, but commit_state is true");
    s.args.commit_state = false;
    expect_ok(s.run());
    s.args.parent_tokens = table(later, 3);
    s.expect_invalid("parent_tokens[1,1] is 1; a parent comes before its token");
    s.args.parent_tokens = table(tree, 3);
    s.args.intermediate_indices = offsets(skipped);
    s.expect_invalid("parent_tokens needs a row of intermediate_states for each row; row 0 has none");
}

TEST(ApiDecode, NumAcceptedNeedsNoRange) {
    DecodeSetup s(fixed_problem(2));
    const Ints slots = {0, 1, 2, 3};
    const std::vector<std::int64_t> accepted = {INT64_MAX, -7};
    s.args.state_indices = table(slots, 2);
    s.args.num_accepted = tensor(accepted.data(), DType::i64, {2});
    const std::vector<float> before = s.m.pool;
    expect_ok(s.run());
    EXPECT_EQ(s.m.pool, before);
    EXPECT_EQ(s.m.o, std::vector<float>(s.m.o.size(), 0.0f));
}

TEST(ApiDecode, Overlaps) {
    DecodeSetup s(fixed_problem(2));
    s.args.o.data = s.m.v.data();
    s.expect_invalid("output o overlaps input v");
    s.args.o.data = s.m.o.data();
    s.args.intermediate_states = tensor(s.m.pool.data(), DType::f32, {2, 2, 4, 8, 6});
    s.expect_invalid("output intermediate_states overlaps output state");
}

TEST(ApiDecode, NoTokens) {
    DecodeSetup s(fixed_problem(0));
    const std::vector<float> before = s.m.pool;
    expect_ok(s.run());
    EXPECT_EQ(s.m.pool, before);
}

// ---------------------------------------------------------------------------------------------------- commit

struct CommitSetup : DecodeSetup {
    CommitSetup() : DecodeSetup(fixed_problem(3)) {
        commit_args.state = m.whole_pool();
        commit_args.intermediate_states = m.all_steps(3);
        commit_args.accepted = offsets(accepted);
    }
    Status commit_now() const { return commit(plan, commit_args, scratch.get()); }
    void expect_invalid(const std::string& sentence) const {
        expect_error(commit_now(), Code::invalid_argument, "flashqla::commit: " + sentence);
    }
    std::vector<float> slot(std::int64_t n) const {
        const std::ptrdiff_t size = m.Hv * m.K * m.V;
        return {m.pool.begin() + n * size, m.pool.begin() + (n + 1) * size};
    }
    std::vector<float> step(std::int64_t row, std::int64_t t) const {
        const std::ptrdiff_t size = m.Hv * m.K * m.V;
        return {m.steps.begin() + (row * 3 + t) * size, m.steps.begin() + (row * 3 + t + 1) * size};
    }
    Ints accepted = {2, 3};
    CommitArgs commit_args;
};

TEST(ApiCommit, CopiesTheAcceptedState) {
    CommitSetup s;
    for (std::size_t i = 0; i < s.m.steps.size(); ++i) s.m.steps[i] = static_cast<float>(i);
    const Ints slots = {6, 2}, rows = {1, 0};
    s.commit_args.state_indices = offsets(slots);
    s.commit_args.intermediate_indices = offsets(rows);
    const std::vector<float> other = s.slot(0);
    expect_ok(s.commit_now());
    EXPECT_EQ(s.slot(6), s.step(1, 1));
    EXPECT_EQ(s.slot(2), s.step(0, 2));
    EXPECT_EQ(s.slot(0), other);
}

TEST(ApiCommit, ConvertsBetweenDtypes) {
    CommitSetup s;
    std::vector<std::uint16_t> pool(s.m.pool.size());
    for (float& x : s.m.steps) x = 1.5f;
    s.commit_args.state = tensor(pool.data(), DType::bf16, {8, 4, 8, 6});
    expect_ok(s.commit_now());
    EXPECT_EQ(pool[0], 0x3fc0);                  // 1.5
    EXPECT_EQ(pool[2 * 4 * 8 * 6 - 1], 0x3fc0);  // the last of slot 1
    EXPECT_EQ(pool[2 * 4 * 8 * 6], 0);
}

TEST(ApiCommit, RowsThatStay) {
    CommitSetup s;
    const std::vector<float> before = s.m.pool;
    const Ints out_of_range = {0, 4}, pads = {-1, -5}, none = {-1, -1};
    s.commit_args.accepted = offsets(out_of_range);
    expect_ok(s.commit_now());
    s.commit_args.accepted = offsets(s.accepted);
    s.commit_args.state_indices = offsets(pads);
    expect_ok(s.commit_now());
    s.commit_args.state_indices = {};
    s.commit_args.intermediate_indices = offsets(none);
    expect_ok(s.commit_now());
    EXPECT_EQ(s.m.pool, before);
}

TEST(ApiCommit, BadArguments) {
    CommitSetup s;
    const CommitArgs good = s.commit_args;
    const Ints beyond = {0, 8}, twice = {3, 3}, no_row = {0, 2};
    s.commit_args.accepted = {};
    s.expect_invalid("accepted is not given; this plan needs [2]");
    s.commit_args = good;
    s.commit_args.state = {};
    s.expect_invalid("state is not given; this plan needs [>=2,4,8,6]");
    s.commit_args = good;
    s.commit_args.intermediate_states = {};
    s.expect_invalid("intermediate_states is not given; this plan needs [>=2,>=3,4,8,6]");
    s.commit_args = good;
    s.commit_args.state_indices = offsets(beyond);
    s.expect_invalid("state_indices sends row 1 to slot 8; state has 8 slots");
    s.commit_args.state_indices = offsets(twice);
    s.expect_invalid("state_indices names slot 3 twice; what is written must be unique");
    s.commit_args = good;
    s.commit_args.intermediate_indices = offsets(no_row);
    s.expect_invalid("intermediate_indices[1] is 2; intermediate_states has 2 rows");
    s.commit_args = good;
    s.commit_args.state = tensor(s.m.steps.data(), DType::f32, {8, 4, 8, 6});
    s.expect_invalid("output state overlaps input intermediate_states");
    expect_error(commit(s.plan, good, {}), Code::workspace_too_small,
                 "flashqla::commit: workspace has 0 bytes; this plan needs " +
                     std::to_string(s.plan.workspace_bytes(Pass::decode)));
}

}  // namespace
}  // namespace flashqla::test
