// The model against what transformers computed from the same weights.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "check.hpp"
#include "fixture.hpp"
#include "generate.hpp"
#include "score.hpp"

namespace qwen3_next {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSlow = true;
#else
constexpr bool kSlow = false;
#endif

double metric(const char* name) {
    const auto metrics = nlohmann::json::parse(std::ifstream(kDirectory + "/metrics.json"));
    return metrics.at(name).get<double>();
}

TEST(Model, HasTheParametersOfTheFile) { EXPECT_EQ(model().parameters, 3'959'584); }

TEST(Model, Logits) {
    const Reference reference = load_reference(kDirectory);
    Network network(model(), {.users = 1, .max_rows = 256});
    const Piece piece{0, reference.input};
    const auto logits = network.prefill({&piece, 1}, Rows::all);
    ASSERT_EQ(logits.size(), reference.logits.size());
    EXPECT_LE(relative_l2(logits, reference.logits), 1e-5);
    EXPECT_EQ(agreeing_argmax(logits, reference.logits, 256), 256);
}

TEST(Model, LogitsOfTheLastByteAlone) {
    const Reference reference = load_reference(kDirectory);
    Network network(model(), {.users = 1, .max_rows = 256});
    const auto last = network.read(0, reference.input);
    ASSERT_EQ(last.size(), 256u);
    EXPECT_LE(relative_l2(last, std::span(reference.logits).last(256)), 1e-5);
}

TEST(Model, GreedyText) {
    const Reference reference = load_reference(kDirectory);
    Network network(model(), {.users = 1, .max_rows = 64});
    Sampler greedy(0, 0);
    const auto length = static_cast<std::int64_t>(reference.continuation.size());
    const Generation result = generate(network, {&reference.prompt, 1}, length, {&greedy, 1});
    EXPECT_EQ(result.texts.at(0), reference.continuation);
}

TEST(Model, BitsPerByte) {
    if (kSlow) GTEST_SKIP() << "64 KiB take minutes under a sanitizer";
    ASSERT_EQ(heldout().size(), 65536u);
    Network network(model(), {.users = 1, .max_rows = 1024});
    const Score score = score_text(network, heldout());
    EXPECT_EQ(score.bytes, 65535);
    EXPECT_NEAR(score.per_byte(), metric("bits_per_byte"), 1e-3);
}

TEST(Model, BitsPerByteInWindows) {
    if (kSlow) GTEST_SKIP() << "64 KiB take minutes under a sanitizer";
    Network network(model(), {.users = 4, .max_rows = 4096});
    const Score score = score_windows(network, heldout(), 1024);
    EXPECT_EQ(score.bytes, 63 * 1024);
    EXPECT_NEAR(score.per_byte(), metric("bits_per_byte_windows_of_1024"), 1e-3);
}

// The rule alone, on what layer 1 gives it.
class Rule : public testing::TestWithParam<const char*> {};

TEST_P(Rule, InFp32) {
    const RuleCheck rule = check_rule(kDirectory, GetParam(), flashqla::DType::f32);
    EXPECT_LE(std::ranges::max(rule.o_error), 1e-5);
    EXPECT_LE(std::ranges::max(rule.state_error), 1e-5);
}

TEST_P(Rule, InBf16) {
    const RuleCheck rule = check_rule(kDirectory, GetParam(), flashqla::DType::bf16);
    EXPECT_LE(std::ranges::max(rule.o_error), 5e-3);
    EXPECT_LE(std::ranges::max(rule.state_error), 5e-3);
}

INSTANTIATE_TEST_SUITE_P(Backends, Rule, testing::Values("", "reference"), [](const auto& tested) {
    return std::string(tested.param).empty() ? std::string("best") : std::string(tested.param);
});

TEST(Model, LogitsWithTheOracle) {
    const std::string_view text = std::string_view(heldout()).substr(0, 200);
    Network best(model(), {.users = 1, .max_rows = 200});
    Network oracle(model(), {.users = 1, .max_rows = 200, .backend = "reference"});
    EXPECT_LE(relative_l2(logits_in_pieces(best, 0, text, {200}), logits_in_pieces(oracle, 0, text, {200})), 1e-5);
}

}  // namespace
}  // namespace qwen3_next
