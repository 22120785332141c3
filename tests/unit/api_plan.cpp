// Plans: defaults, the choice of a backend, explain(), sharing between threads.
#include <array>
#include <cmath>
#include <cstdlib>
#include <thread>

#include "api_setup.hpp"

namespace flashqla::test {
namespace {

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

#define EXPECT_CONTAINS(text, part) EXPECT_TRUE(contains(text, part)) << "no '" << (part) << "' in:\n" << (text)

TEST(ApiPlan, DefaultsAreFilledIn) {
    Problem p = fixed_problem();
    p.io = DType::bf16;
    const Plan plan = check(Plan::create(p));
    EXPECT_EQ(plan.problem().out, DType::bf16);
    EXPECT_FLOAT_EQ(plan.problem().scale, 1.0f / std::sqrt(8.0f));
    EXPECT_EQ(plan.device(), Device{});
    EXPECT_EQ(plan.workspace_bytes(Pass::forward) % 64, 0u);
}

TEST(ApiPlan, EmptyPlan) {
    const Plan plan;
    EXPECT_EQ(plan.backend(Pass::forward), "");
    EXPECT_EQ(plan.workspace_bytes(Pass::decode), 0u);
    EXPECT_EQ(plan.checkpoint_rows(), 0);
    EXPECT_EQ(plan.explain(), "an empty plan; make one with Plan::create\n");
    expect_error(forward(plan, {}, {}), Code::invalid_argument,
                 "flashqla::forward: the plan is empty; make one with Plan::create");
    expect_error(backward(plan, {}, {}), Code::invalid_argument,
                 "flashqla::backward: the plan is empty; make one with Plan::create");
    expect_error(decode(plan, {}, {}), Code::invalid_argument,
                 "flashqla::decode: the plan is empty; make one with Plan::create");
    expect_error(commit(plan, {}, {}), Code::invalid_argument,
                 "flashqla::commit: the plan is empty; make one with Plan::create");
}

TEST(ApiPlan, PassesThatWereNotPlanned) {
    const Plan plan = check(Plan::create(fixed_problem(17), {}, on_reference()));
    EXPECT_EQ(plan.backend(Pass::forward), "reference");
    EXPECT_EQ(plan.backend(Pass::backward), "");
    EXPECT_EQ(plan.backend(Pass::decode), "");
    EXPECT_EQ(plan.workspace_bytes(Pass::backward), 0u);
    expect_error(backward(plan, {}, {}), Code::invalid_argument,
                 "flashqla::backward: this plan has no backward pass; set Problem::for_backward when it is made");
    const char* no_decode =
        "flashqla::decode: this plan has no decode pass; rows have 17 tokens, and decode takes at most 16";
    expect_error(decode(plan, {}, {}), Code::invalid_argument, no_decode);
}

TEST(ApiPlan, VectorGateIsRefusedByEveryBackend) {
    Problem p = fixed_problem();
    p.gate = Gate::vector;
    const Status status = Plan::create(p).status();
    EXPECT_EQ(status.code(), Code::unsupported);
    EXPECT_CONTAINS(status.message(), "flashqla::Plan::create: no backend can do the forward pass of this problem (");
    for (const char* name : {"cpu", "reference"}) {
        if (contains(backend_names(), name)) {
            EXPECT_CONTAINS(status.message(), std::string(name) + ": ");
        }
    }
}

TEST(ApiPlan, NoBackendForCuda) {
    const Status status = Plan::create(fixed_problem(), {DeviceType::cuda, 0}).status();
    EXPECT_EQ(status.code(), Code::unsupported);
    EXPECT_CONTAINS(status.message(), "reference: runs on cpu, the plan is for cuda:0");
}

TEST(ApiPlan, TheEnvironmentForcesABackend) {
    ASSERT_EQ(setenv("FQLA_FORCE_BACKEND", "reference", 1), 0);
    const Plan plan = check(Plan::create(fixed_problem()));
    ASSERT_EQ(setenv("FQLA_FORCE_BACKEND", "abacus", 1), 0);
    const Status unknown = Plan::create(fixed_problem()).status();
    const Status overruled = Plan::create(fixed_problem(), {}, on_reference()).status();
    ASSERT_EQ(setenv("FQLA_FORCE_BACKEND", "", 1), 0);
    expect_ok(Plan::create(fixed_problem()).status());
    ASSERT_EQ(unsetenv("FQLA_FORCE_BACKEND"), 0);
    EXPECT_EQ(plan.backend(Pass::forward), "reference");
    EXPECT_CONTAINS(plan.explain(), "backend reference by FQLA_FORCE_BACKEND");
    expect_error(
        unknown, Code::invalid_argument,
        "flashqla::Plan::create: FQLA_FORCE_BACKEND asks for the backend 'abacus'; this build has " + backend_names());
    expect_ok(overruled);
}

TEST(ApiPlan, ExplainTellsEverything) {
    Problem p = packed_problem();
    p.tokens = 1000;
    p.for_backward = true;
    p.checkpoints = Checkpoints::chunk_starts;
    const Plan plan = check(Plan::create(p, {}, on_reference()));
    const std::string text = plan.explain();
    EXPECT_CONTAINS(text, "3 packed sequences in 1000 tokens, heads 2/4, K 8, V 6, q k v f32, o f32");
    EXPECT_CONTAINS(text, "gate log, beta value x 1, scale 0.353553, qk l2norm no, grouping interleaved");
    EXPECT_CONTAINS(text, "layout kv, padding slots < 0, checkpoints at chunk starts, at most 18 rows");
    EXPECT_CONTAINS(text, "backend reference by PlanOptions::backend");
    for (const char* pass : {"\nforward   reference\n", "\nbackward  reference\n", "\ndecode    reference\n"}) {
        EXPECT_CONTAINS(text, pass);
    }
    EXPECT_CONTAINS(text, "workspace " + std::to_string(plan.workspace_bytes(Pass::backward)) + " bytes");
    EXPECT_CONTAINS(text, "  slot check\n");
    if (contains(backend_names(), "cpu")) {
        EXPECT_CONTAINS(text, "  not cpu: not considered, PlanOptions::backend asks for reference\n");
    }
}

TEST(ApiPlan, CheckpointRowsAreABound) {
    Problem p = fixed_problem(130);
    EXPECT_EQ(check(Plan::create(p)).checkpoint_rows(), 0);
    p.checkpoints = Checkpoints::chunk_starts;
    EXPECT_EQ(check(Plan::create(p)).checkpoint_rows(), 2 * 3);
    p.checkpoints = Checkpoints::every_n;
    p.checkpoint_every = 50;
    EXPECT_EQ(check(Plan::create(p)).checkpoint_rows(), 2 * 2);

    Problem packed = packed_problem();
    packed.checkpoints = Checkpoints::chunk_starts;
    for (const std::int64_t tokens : {0, 1, 2, 3, 64, 65, 66, 130, 200}) {
        packed.tokens = tokens;
        const std::int64_t bound = check(Plan::create(packed)).checkpoint_rows();
        std::int64_t most = 0;
        for (std::int64_t a = 0; a <= tokens; ++a) {
            for (std::int64_t b = a; b <= tokens; ++b) {
                most = std::max(most, (a + 63) / 64 + (b - a + 63) / 64 + (tokens - b + 63) / 64);
            }
        }
        EXPECT_EQ(bound, most) << tokens;
    }
}

TEST(ApiPlan, EightThreadsShareOnePlan) {
    const ForwardSetup once(packed_problem());
    expect_ok(once.run());
    std::array<std::vector<float>, 8> outputs;
    std::array<Status, 8> statuses;
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
        threads.emplace_back([&, i] {
            outputs[i].resize(once.m.o.size());
            std::vector<float> state(once.m.final.size());
            const Scratch scratch(once.plan.workspace_bytes(Pass::forward));
            ForwardArgs args = once.args;
            args.o = once.m.values(outputs[i]);
            args.final_state = once.m.states(state);
            for (int repeat = 0; repeat < 20 && statuses[i].ok(); ++repeat) {
                statuses[i] = forward(once.plan, args, scratch.get());
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (std::size_t i = 0; i < outputs.size(); ++i) {
        expect_ok(statuses[i]);
        EXPECT_EQ(outputs[i], once.m.o);
    }
}

TEST(ApiInfo, SaysWhatThisBuildIs) {
    EXPECT_STREQ(version(), "0.1.0");
    EXPECT_EQ(abi_version(), 1);
    EXPECT_CONTAINS(backend_names(), "reference");
    const std::string text = system_info();
    for (const char* key : {"version: 0.1.0\n", "compiler: ", "build: ", "backends: ", "backend reference: ", "cpu: ",
                            "cpu features: ", "cpu threads: ", "gpus: "}) {
        EXPECT_CONTAINS(text, key);
    }
    if (!contains(backend_names(), "cuda")) {
        EXPECT_CONTAINS(text, "gpus: none (no GPU backend in this build)\n");
    }
}

TEST(ApiStatus, IsSmallAndCopies) {
    const Status good;
    EXPECT_TRUE(good.ok());
    EXPECT_EQ(good.code(), Code::ok);
    EXPECT_EQ(good.message(), "");
    const Status bad(Code::internal, "a sentence");
    const Status copy = bad;
    EXPECT_FALSE(copy);
    EXPECT_EQ(copy.message(), "a sentence");
    EXPECT_THROW(check(bad), std::runtime_error);
    EXPECT_THROW(check(Result<int>(bad)), std::runtime_error);
    EXPECT_EQ(check(Result<int>(7)), 7);
}

}  // namespace
}  // namespace flashqla::test
