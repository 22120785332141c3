// What forward() refuses, with its sentence, and what it accepts.
#include <cmath>

#include "api_setup.hpp"

namespace flashqla::test {
namespace {

using Ints = std::vector<std::int32_t>;

TEST(ApiForward, AcceptsTheSetups) {
    expect_ok(ForwardSetup(fixed_problem()).run());
    expect_ok(ForwardSetup(packed_problem()).run());
}

TEST(ApiForward, MissingArguments) {
    const ForwardSetup good(fixed_problem());
    ForwardSetup s(fixed_problem());
    s.args.q = {};
    s.expect_invalid("q is not given; this plan needs [2,8,2,8]");
    s.args = good.args;
    s.args.k = {};
    s.expect_invalid("k is not given; this plan needs [2,8,2,8]");
    s.args = good.args;
    s.args.v = {};
    s.expect_invalid("v is not given; this plan needs [2,8,4,6]");
    s.args = good.args;
    s.args.g = {};
    s.expect_invalid("g is not given; this plan needs [2,8,4]");
    s.args = good.args;
    s.args.o = {};
    s.expect_invalid("o is not given; this plan needs [2,8,4,6]");
    s.args.o.data = s.m.o.data();
    s.expect_invalid("o has data but no dtype; give it a dtype, or leave it out altogether");

    Problem raw = fixed_problem();
    raw.gate = Gate::raw;
    ForwardSetup r(raw);
    expect_ok(r.run());
    r.args.dt_bias = {};
    expect_ok(r.run());
    r.args.A_log = {};
    r.expect_invalid("A_log is not given; this plan needs [4]");

    ForwardSetup packed(packed_problem());
    packed.args.cu_seqlens = {};
    packed.expect_invalid("cu_seqlens is not given; this plan needs [4]");
}

TEST(ApiForward, OptionalArguments) {
    ForwardSetup s(fixed_problem());
    s.args.beta = s.args.initial_state = s.args.final_state = {};
    expect_ok(s.run());
}

TEST(ApiForward, ArgumentsThatThePlanDoesNotUse) {
    const Ints table = {0, 8, 16};
    ForwardSetup s(fixed_problem());
    const ForwardArgs good = s.args;
    s.args.A_log = s.m.heads(s.m.A_log);
    s.expect_invalid("A_log is given, but only Gate::raw uses it");
    s.args = good;
    s.args.dt_bias = s.m.heads(s.m.dt_bias);
    s.expect_invalid("dt_bias is given, but only Gate::raw uses it");
    s.args = good;
    s.args.cu_seqlens = offsets(table);
    s.expect_invalid("cu_seqlens is given, but this plan is for sequences of fixed length");
    s.args = good;
    s.args.checkpoints = s.m.states(s.m.steps);
    s.expect_invalid("checkpoints is given, but this plan has Checkpoints::none");
    s.args = good;
    s.args.checkpoint_list = tensor(table.data(), DType::i32, {1, 2});
    s.expect_invalid("checkpoint_list is given, but this plan has Checkpoints::none");
    s.args = good;
    s.args.initial_state = {};
    s.args.has_initial_state = tensor(table.data(), DType::i32, {2});
    s.expect_invalid("has_initial_state is given, but initial_state is not");
    s.args = good;
    s.args.final_state = {};
    s.args.state_indices_out = tensor(table.data(), DType::i32, {2});
    s.expect_invalid("state_indices_out is given, but final_state is not");
    s.args = good;
    s.args.initial_state = s.args.final_state = {};
    s.args.state_indices = tensor(table.data(), DType::i32, {2});
    s.expect_invalid("state_indices is given, but neither initial_state nor final_state is");

    Problem none = fixed_problem();
    none.gate = Gate::none;
    ForwardSetup n(none);
    expect_ok(n.run());
    n.args.g = n.m.gates(n.m.g);
    n.expect_invalid("g is given, but this plan has Gate::none");

    Problem chunks = fixed_problem();
    chunks.checkpoints = Checkpoints::chunk_starts;
    ForwardSetup c(chunks);
    c.args.checkpoints = c.m.states(c.m.steps);
    expect_ok(c.run());
    c.args.checkpoint_list = tensor(table.data(), DType::i32, {1, 2});
    c.expect_invalid("checkpoint_list is given, but only Checkpoints::listed uses it");
}

TEST(ApiForward, WrongShapes) {
    ForwardSetup s(fixed_problem());
    const ForwardArgs good = s.args;
    s.args.k = tensor(s.m.k.data(), DType::f32, {2, 8, 2, 6});
    s.expect_invalid("k has shape [2,8,2,6]; this plan needs [2,8,2,8]");
    s.args.k = tensor(s.m.k.data(), DType::f32, {16, 2, 8});
    s.expect_invalid("k has shape [16,2,8]; this plan needs [2,8,2,8]");
    s.args.k = tensor(s.m.k.data(), DType::f32, {1, 1, 2, 8, 2, 4, 2});
    s.expect_invalid("k has shape [1,1,2,8,2,4...rank 7]; this plan needs [2,8,2,8]");
    s.args.k.rank = -1;
    s.expect_invalid("k has shape [...rank -1]; this plan needs [2,8,2,8]");
    s.args = good;
    s.args.v = tensor(s.m.v.data(), DType::f32, {2, -8, 4, 6});
    s.expect_invalid("v has shape [2,-8,4,6]; this plan needs [2,8,4,6]");
    s.args = good;
    s.args.beta = tensor(s.m.beta.data(), DType::f32, {2, 8, 2});
    s.expect_invalid("beta has shape [2,8,2]; this plan needs [2,8,4]");
    s.args = good;
    s.args.initial_state = tensor(s.m.initial.data(), DType::f32, {2, 4, 6, 8});
    s.expect_invalid("initial_state has shape [2,4,6,8]; this plan needs [2,4,8,6]");
    s.args = good;
    s.args.final_state = s.m.whole_pool();
    s.expect_invalid("final_state has shape [8,4,8,6]; this plan needs [2,4,8,6]");

    Problem vk = fixed_problem();
    vk.state_layout = StateLayout::vk;
    ForwardSetup t(vk);
    t.expect_invalid("initial_state has shape [2,4,8,6]; this plan needs [2,4,6,8]");
}

TEST(ApiForward, WrongDtypes) {
    ForwardSetup s(fixed_problem());
    const ForwardArgs good = s.args;
    s.args.q.dtype = DType::bf16;
    s.expect_invalid("q has dtype bf16; this plan needs f32");
    s.args = good;
    s.args.g.dtype = DType::i32;
    s.expect_invalid("g has dtype i32; this plan needs f32 or f16 or bf16");
    s.args = good;
    s.args.o.dtype = static_cast<DType>(1000);
    s.expect_invalid("o has dtype number 1000 (not a dtype); this plan needs f32");
    s.args.o.dtype = static_cast<DType>(-1);
    s.expect_invalid("o has dtype number -1 (not a dtype); this plan needs f32");
    s.args = good;
    s.args.final_state.dtype = DType::i64;
    s.expect_invalid("final_state has dtype i64; this plan needs f32 or f16 or bf16");

    ForwardSetup packed(packed_problem());
    packed.args.cu_seqlens.dtype = DType::f32;
    packed.expect_invalid("cu_seqlens has dtype f32; this plan needs i32 or i64");
}

TEST(ApiForward, WrongDevice) {
    ForwardSetup s(fixed_problem());
    s.args.v.device = {DeviceType::cuda, 1};
    s.expect_invalid("v is on cuda:1; this plan runs on cpu:0");
    s.args.v.device = {static_cast<DeviceType>(7), 0};
    s.expect_invalid("v is on unknown device type 7; this plan runs on cpu:0");
}

TEST(ApiForward, BadStrides) {
    ForwardSetup s(fixed_problem());
    const ForwardArgs good = s.args;
    s.args.q.stride[3] = 2;
    s.expect_invalid("q has a last stride of 2; it must be 1");
    s.args = good;
    s.args.g.stride[2] = 0;
    s.expect_invalid("g has a last stride of 0; it must be 1");
    s.args = good;
    s.args.o.stride[1] = 0;
    s.expect_invalid("o has stride 0 in dimension 1 of size 8; an output needs a place of its own for each element");
    s.args = good;
    s.args.o.stride[1] = 5;
    s.expect_invalid("o has strides that make its elements overlap; an output needs a place of its own for each");
    s.args = good;
    s.args.initial_state.stride[2] = 7;
    s.expect_invalid(
        "initial_state has stride 7 in dimension 2; the inner two dimensions of a state are contiguous, so it must be "
        "6");
    s.args = good;
    s.args.k.stride[0] = INT64_MAX;
    s.expect_invalid("k has strides that lead out of the address space");
    s.args.k.stride[0] = INT64_MIN;
    s.expect_invalid("k has strides that lead out of the address space");
    s.args = good;
    s.args.k.stride[1] = 0;  // an input may repeat itself
    expect_ok(s.run());
}

TEST(ApiForward, NullAndMisaligned) {
    ForwardSetup s(fixed_problem());
    const ForwardArgs good = s.args;
    s.args.q.data = nullptr;
    s.expect_invalid("q has null data and shape [2,8,2,8]; only a tensor without elements may be null");
    s.args = good;
    s.args.o.data = reinterpret_cast<std::byte*>(s.m.o.data()) + 2;
    s.expect_invalid("o is misaligned: its address is not a multiple of 4 bytes, the size of f32");
}

TEST(ApiForward, Workspaces) {
    ForwardSetup s(fixed_problem());
    const std::size_t needed = s.plan.workspace_bytes(Pass::forward);
    const Workspace good = s.scratch.get();
    const std::string bytes = std::to_string(needed);
    expect_error(forward(s.plan, s.args, {good.data, needed - 1}), Code::workspace_too_small,
                 "flashqla::forward: workspace has " + std::to_string(needed - 1) + " bytes; this plan needs " + bytes);
    expect_error(forward(s.plan, s.args, {}), Code::workspace_too_small,
                 "flashqla::forward: workspace has 0 bytes; this plan needs " + bytes);
    expect_error(forward(s.plan, s.args, {nullptr, needed}), Code::invalid_argument,
                 "flashqla::forward: workspace is null; this plan needs " + bytes + " bytes");
    expect_error(forward(s.plan, s.args, {static_cast<std::byte*>(good.data) + 8, needed}), Code::invalid_argument,
                 "flashqla::forward: workspace is misaligned: its address is not a multiple of 64 bytes");
    const Scratch both(2 * needed + s.m.q.size() * 4 + 256);
    s.args.q.data = static_cast<std::byte*>(both.get().data) + 4;
    expect_error(forward(s.plan, s.args, both.get()), Code::invalid_argument,
                 "flashqla::forward: output workspace overlaps input q");
}

TEST(ApiForward, Offsets) {
    ForwardSetup s(packed_problem());
    const struct {
        Ints offsets;
        const char* sentence;
    } cases[] = {
        {{1, 5, 5, 14}, "cu_seqlens starts at 1; it must start at 0"},
        {{-1, 5, 5, 14}, "cu_seqlens starts at -1; it must start at 0"},
        {{0, 5, 4, 14}, "cu_seqlens[2] is 4 after 5; offsets must never decrease"},
        {{0, 5, -3, 14}, "cu_seqlens[2] is -3 after 5; offsets must never decrease"},
        {{0, 5, 5, 17}, "cu_seqlens ends at 17; this plan has 16 tokens"},
    };
    for (const auto& c : cases) {
        s.args.cu_seqlens = offsets(c.offsets);
        s.expect_invalid(c.sentence);
    }
    const std::vector<std::int64_t> wide = {0, 5, 5, INT64_MAX};
    s.args.cu_seqlens = tensor(wide.data(), DType::i64, {4});
    s.expect_invalid("cu_seqlens ends at 9223372036854775807; this plan has 16 tokens");
    s.args.cu_seqlens = tensor(wide.data(), DType::i64, {3});
    s.expect_invalid("cu_seqlens has shape [3]; this plan needs [4]");
    for (const Ints& good : {Ints{0, 0, 0, 0}, Ints{0, 16, 16, 16}, Ints{0, 0, 16, 16}}) {
        s.args.cu_seqlens = offsets(good);
        expect_ok(s.run());
    }
}

// ----------------------------------------------------------------------------------------------------- slots

struct PoolSetup : ForwardSetup {
    PoolSetup() : ForwardSetup(packed_problem()) { args.initial_state = args.final_state = m.whole_pool(); }
    void set(const Ints& read) { args.state_indices = offsets(read); }
};

TEST(ApiForwardSlots, OutOfRangeAndRepeated) {
    PoolSetup s;
    const Ints good = {3, 0, 7}, beyond = {3, 0, 8}, twice = {3, 0, 3}, pads = {-1, -1, -1};
    s.set(good);
    expect_ok(s.run());
    s.set(beyond);
    s.expect_invalid("state_indices sends row 2 to slot 8; initial_state has 8 slots");
    s.args.initial_state = {};
    s.expect_invalid("state_indices sends row 2 to slot 8; final_state has 8 slots");
    s.args.initial_state = s.m.whole_pool();
    s.set(twice);
    s.expect_invalid("state_indices names slot 3 twice; what is written must be unique");
    s.args.final_state = {};  // nothing is written, any number may read
    expect_ok(s.run());
    s.args.final_state = s.m.whole_pool();
    s.set(pads);
    expect_ok(s.run());
}

TEST(ApiForwardSlots, PadRules) {
    Problem p = packed_problem();
    p.pad_rule = PadRule::non_positive;
    ForwardSetup s(p);
    s.args.initial_state = s.args.final_state = s.m.whole_pool();
    const Ints zeros = {0, 0, 5};
    s.args.state_indices = offsets(zeros);
    expect_ok(s.run());
    PoolSetup t;
    t.set(zeros);
    t.expect_invalid("state_indices names slot 0 twice; what is written must be unique");
}

TEST(ApiForwardSlots, WrittenByOneReadByAnother) {
    PoolSetup s;
    const Ints read = {1, 2, 3}, apart = {4, 5, 6}, own = {1, 2, 3}, crossed = {2, 5, 6}, beyond = {4, 5, 9};
    s.set(read);
    s.args.state_indices_out = offsets(apart);
    expect_ok(s.run());
    s.args.state_indices_out = offsets(own);
    expect_ok(s.run());
    s.args.state_indices_out = offsets(crossed);
    s.expect_invalid(
        "row 1 reads slot 2, which another row writes through state_indices_out; such a slot may have no "
        "other reader");
    s.args.state_indices_out = offsets(beyond);
    s.expect_invalid("state_indices_out sends row 2 to slot 9; final_state has 8 slots");
    // Two pools: the slot that is read is not the slot that is written.
    std::vector<float> other(s.m.pool.size());
    s.args.final_state = tensor(other.data(), DType::f32, {8, 4, 8, 6});
    s.args.state_indices_out = offsets(crossed);
    expect_ok(s.run());
    // A row without a start state reads nothing.
    const Ints has = {1, 0, 1};
    s.args.final_state = s.m.whole_pool();
    s.args.has_initial_state = tensor(has.data(), DType::i32, {3});
    expect_ok(s.run());
}

TEST(ApiForwardSlots, IndexTensors) {
    PoolSetup s;
    const Ints strided = {3, 99, 0, 99, 7, 99};
    s.args.state_indices = tensor(strided.data(), DType::i32, {3}, {2});
    expect_ok(s.run());
    s.args.state_indices = tensor(strided.data(), DType::i32, {2});
    s.expect_invalid("state_indices has shape [2]; this plan needs [3]");
    s.args.state_indices = tensor(strided.data(), DType::u8, {3});
    s.expect_invalid("state_indices has dtype u8; this plan needs i32 or i64");
    s.args.state_indices = {};
    s.args.initial_state = s.args.final_state = s.m.states(s.m.initial);
    s.args.has_initial_state = tensor(strided.data(), DType::i64, {3});
    s.expect_invalid("has_initial_state has dtype i64; this plan needs i32 or u8");
}

// ----------------------------------------------------------------------------------------------- checkpoints

TEST(ApiForwardCheckpoints, RowsAndLists) {
    Problem p = packed_problem();
    p.checkpoints = Checkpoints::every_n;
    p.checkpoint_every = 4;
    ForwardSetup s(p);
    s.expect_invalid("checkpoints is not given; this plan needs [>=3,4,8,6]");
    s.args.checkpoints = tensor(s.m.steps.data(), DType::f32, {2, 4, 8, 6});
    s.expect_invalid("checkpoints has shape [2,4,8,6]; this plan needs [>=3,4,8,6]");
    s.args.checkpoints = tensor(s.m.steps.data(), DType::f32, {3, 4, 8, 6});
    expect_ok(s.run());

    p.checkpoints = Checkpoints::listed;
    p.checkpoint_every = 0;
    ForwardSetup t(p);
    t.expect_invalid("checkpoint_list is not given; this plan needs [>=0,2]");
    const struct {
        Ints list;
        const char* sentence;
    } cases[] = {
        {{0, 5, -1, 77, 2, 9}, nullptr},
        {{0, 5, 3, 0, 2, 9}, "checkpoint_list[1] names sequence 3; this plan has 3 sequences"},
        {{0, 6, 1, 0, 2, 9}, "checkpoint_list[0] names token 6 of sequence 0; it must be between 0 and the length, 5"},
        {{0, 0, 1, 0, 2, -1},
         "checkpoint_list[2] names token -1 of sequence 2; it must be between 0 and the length, 9"},
    };
    t.args.checkpoints = tensor(t.m.steps.data(), DType::f32, {3, 4, 8, 6});
    for (const auto& c : cases) {
        t.args.checkpoint_list = tensor(c.list.data(), DType::i32, {3, 2});
        if (c.sentence) {
            t.expect_invalid(c.sentence);
        } else {
            expect_ok(t.run());
        }
    }
    t.args.checkpoint_list = tensor(cases[0].list.data(), DType::i32, {2, 2});
    t.expect_invalid("checkpoints has shape [3,4,8,6]; this plan needs [2,4,8,6]");
}

// ------------------------------------------------------------------------------------------------ empty sizes

TEST(ApiForwardEmpty, NoTokensKeepTheState) {
    Problem p = fixed_problem(0);
    ForwardSetup s(p);
    s.args.q.data = s.args.k.data = s.args.v.data = s.args.o.data = nullptr;
    expect_ok(s.run());
    EXPECT_EQ(s.m.final, s.m.initial);
    s.args.initial_state = {};
    expect_ok(s.run());
    EXPECT_EQ(s.m.final, std::vector<float>(s.m.final.size(), 0.0f));
}

TEST(ApiForwardEmpty, NoRows) {
    Problem p = fixed_problem();
    p.batch = 0;
    expect_ok(ForwardSetup(p).run());
}

TEST(ApiForwardEmpty, AllSequencesEmpty) {
    ForwardSetup s(packed_problem());
    const Ints none = {0, 0, 0, 0};
    s.args.cu_seqlens = offsets(none);
    std::fill(s.m.o.begin(), s.m.o.end(), NAN);
    expect_ok(s.run());
    EXPECT_EQ(s.m.final, s.m.initial);
    EXPECT_EQ(s.m.o, std::vector<float>(s.m.o.size(), 0.0f));
}

}  // namespace
}  // namespace flashqla::test
