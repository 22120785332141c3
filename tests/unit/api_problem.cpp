// Plan::create says in one sentence what is wrong with a problem.
#include <cmath>
#include <functional>
#include <limits>

#include "api_setup.hpp"

namespace flashqla::test {
namespace {

struct BadProblem {
    const char* name;
    std::function<void(Problem&)> spoil;
    const char* sentence;  // after "flashqla::Plan::create: "
};

const BadProblem kBadProblems[] = {
    {"NegativeBatch", [](Problem& p) { p.batch = -1; }, "batch is -1; it must be 0 or more"},
    {"NegativeTokens", [](Problem& p) { p.tokens = -5; }, "tokens is -5; it must be 0 or more"},
    {"NegativeSequences", [](Problem& p) { p.sequences = -2; },
     "sequences is -2; it must be 0 (fixed length) or the number of packed sequences"},
    {"BatchOfPacked", [](Problem& p) { p.sequences = 3; },
     "batch is 2 with 3 packed sequences; a packed problem needs batch 1"},
    {"NoKeyHeads", [](Problem& p) { p.heads_k = 0; }, "heads_k is 0; it must be 1 or more"},
    {"NegativeValueHeads", [](Problem& p) { p.heads_v = -4; }, "heads_v is -4; it must be 1 or more"},
    {"NoDimK", [](Problem& p) { p.dim_k = 0; }, "dim_k is 0; it must be 1 or more"},
    {"NegativeDimV", [](Problem& p) { p.dim_v = -128; }, "dim_v is -128; it must be 1 or more"},
    {"HeadsNotAMultiple", [](Problem& p) { p.heads_v = 5; },
     "heads_v is 5; it must be a multiple of heads_k, which is 2"},
    {"FewerValueHeads", [](Problem& p) { p.heads_v = 1; },
     "heads_v is 1; it must be a multiple of heads_k, which is 2"},
    {"IntegerInputs", [](Problem& p) { p.io = DType::i32; }, "io is i32; q, k and v may be f32, f16 or bf16"},
    {"NoInputs", [](Problem& p) { p.io = DType::none; }, "io is none; q, k and v may be f32, f16 or bf16"},
    {"UnknownInputs", [](Problem& p) { p.io = static_cast<DType>(99); },
     "io is number 99 (not a dtype); q, k and v may be f32, f16 or bf16"},
    {"OutputNarrower", [](Problem& p) { p.out = DType::bf16; }, "out is bf16; o may be f32 as io is, or f32"},
    {"UnknownGate", [](Problem& p) { p.gate = static_cast<Gate>(4); },
     "gate is 4, which is not a value of its enumeration"},
    {"UnknownBetaMode", [](Problem& p) { p.beta_mode = static_cast<BetaMode>(-1); },
     "beta_mode is -1, which is not a value of its enumeration"},
    {"UnknownGrouping", [](Problem& p) { p.grouping = static_cast<Grouping>(2); },
     "grouping is 2, which is not a value of its enumeration"},
    {"UnknownLayout", [](Problem& p) { p.state_layout = static_cast<StateLayout>(2); },
     "state_layout is 2, which is not a value of its enumeration"},
    {"UnknownPadRule", [](Problem& p) { p.pad_rule = static_cast<PadRule>(7); },
     "pad_rule is 7, which is not a value of its enumeration"},
    {"UnknownCheckpoints", [](Problem& p) { p.checkpoints = static_cast<Checkpoints>(4); },
     "checkpoints is 4, which is not a value of its enumeration"},
    {"BetaFactor", [](Problem& p) { p.beta_factor = 1.5f; },
     "beta_factor is 1.5; it must be 1, or 2 for negative eigenvalues"},
    {"BetaFactorNan", [](Problem& p) { p.beta_factor = NAN; },
     "beta_factor is nan; it must be 1, or 2 for negative eigenvalues"},
    {"EpsNan", [](Problem& p) { p.l2norm_eps = NAN; }, "l2norm_eps is nan; it must be finite and 0 or more"},
    {"EpsNegative", [](Problem& p) { p.l2norm_eps = -1.0f; }, "l2norm_eps is -1; it must be finite and 0 or more"},
    {"ScaleNan", [](Problem& p) { p.scale = NAN; }, "scale is nan; it must be finite (0 stands for dim_k^-1/2)"},
    {"ScaleInfinite", [](Problem& p) { p.scale = INFINITY; },
     "scale is inf; it must be finite (0 stands for dim_k^-1/2)"},
    {"CheckpointEveryZero", [](Problem& p) { p.checkpoints = Checkpoints::every_n; },
     "checkpoint_every is 0; Checkpoints::every_n needs 1 or more"},
    {"CheckpointEveryUnused", [](Problem& p) { p.checkpoint_every = 64; },
     "checkpoint_every is 64; only Checkpoints::every_n uses it"},
    {"DecodeRowsOfFixed", [](Problem& p) { p.decode_rows = 1; },
     "decode_rows is 1; it must be between 0 and sequences, which is 0"},
    {"DecodeRowsNegative", [](Problem& p) { p.decode_rows = -1; },
     "decode_rows is -1; it must be between 0 and sequences, which is 0"},
    {"DecodeRowsTooMany",
     [](Problem& p) {
         p.batch = 1;
         p.sequences = 3;
         p.decode_rows = 4;
     },
     "decode_rows is 4; it must be between 0 and sequences, which is 3"},
    {"AbsurdTokens", [](Problem& p) { p.tokens = std::numeric_limits<std::int64_t>::max(); },
     "the size of q (batch x tokens x heads_k x dim_k) is absurd; at most 2^48 elements are allowed in a tensor"},
    {"AbsurdValues",
     [](Problem& p) {
         p.tokens = std::int64_t{1} << 40;
         p.heads_k = 1;
         p.heads_v = 1024;
     },
     "the size of v (batch x tokens x heads_v x dim_v) is absurd; at most 2^48 elements are allowed in a tensor"},
    {"AbsurdStates",
     [](Problem& p) {
         p.batch = 1;
         p.sequences = std::int64_t{1} << 46;
     },
     "the size of a state tensor (sequences x heads_v x dim_k x dim_v) is absurd; at most 2^48 elements are allowed "
     "in a tensor"},
    {"AbsurdStateOfNoSequence",
     [](Problem& p) {
         p.batch = 0;
         p.dim_k = p.dim_v = std::numeric_limits<std::int32_t>::max();
     },
     "the size of a state (heads_v x dim_k x dim_v) is absurd; at most 2^48 elements are allowed in a tensor"},
};

void PrintTo(const BadProblem& bad, std::ostream* out) { *out << bad.name; }

class ApiProblem : public testing::TestWithParam<BadProblem> {};

TEST_P(ApiProblem, IsRefused) {
    Problem p = fixed_problem();
    GetParam().spoil(p);
    expect_error(Plan::create(p).status(), Code::invalid_argument,
                 std::string("flashqla::Plan::create: ") + GetParam().sentence);
}

INSTANTIATE_TEST_SUITE_P(Bad, ApiProblem, testing::ValuesIn(kBadProblems),
                         [](const auto& bad) { return std::string(bad.param.name); });

TEST(ApiPlan, BadOptions) {
    PlanOptions options;
    options.threads = -1;
    expect_error(Plan::create(fixed_problem(), {}, options).status(), Code::invalid_argument,
                 "flashqla::Plan::create: options.threads is -1; it must be 0 (automatic) or more");
    options = {};
    options.context_split = -3;
    expect_error(Plan::create(fixed_problem(), {}, options).status(), Code::invalid_argument,
                 "flashqla::Plan::create: options.context_split is -3; it must be 0 (automatic) or more");
    options = {};
    options.backend = "abacus";
    expect_error(Plan::create(fixed_problem(), {}, options).status(), Code::invalid_argument,
                 "flashqla::Plan::create: PlanOptions::backend asks for the backend 'abacus'; this build has " +
                     backend_names());
}

TEST(ApiPlan, BadDevices) {
    expect_error(Plan::create(fixed_problem(), {static_cast<DeviceType>(9), 0}).status(), Code::invalid_argument,
                 "flashqla::Plan::create: device is of unknown device type 9; it must be cpu (1) or cuda (2)");
    expect_error(Plan::create(fixed_problem(), {DeviceType::cpu, -1}).status(), Code::invalid_argument,
                 "flashqla::Plan::create: device index is -1; it must be 0 or more");
}

TEST(ApiPlan, EmptySizesAreFine) {
    for (const auto& [batch, tokens] : {std::pair{0, 8}, std::pair{2, 0}, std::pair{0, 0}}) {
        Problem p = fixed_problem(tokens);
        p.batch = batch;
        p.for_backward = true;
        expect_ok(Plan::create(p).status());
    }
    Problem p = packed_problem();
    p.tokens = 0;
    expect_ok(Plan::create(p).status());
}

}  // namespace
}  // namespace flashqla::test
