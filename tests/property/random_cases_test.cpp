// Random cases against the oracle: sizes, types, strides, pools, options and the properties that hold for them, within
// the tolerances of the case tables. A failure prints the line that reproduces it.
//
// The seeds are fixed (FQLA_TEST_SEED starts elsewhere); each test stops after FQLA_PROPERTY_SECONDS (default 20).
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <functional>

#include "cases/grammar.hpp"
#include "cases/numbers.hpp"
#include "cases/random_case.hpp"
#include "cases/runner.hpp"

namespace flashqla::cases {
namespace {

constexpr std::uint64_t kFirstSeed = 100000;  // away from those of conformance_tests --random
constexpr int kMostCases = 200;               // the same ones on every machine that is quick enough

std::uint64_t first_seed() {
    const char* text = std::getenv("FQLA_TEST_SEED");
    return text ? std::strtoull(text, nullptr, 10) : kFirstSeed;
}

double seconds_allowed() {
    const char* text = std::getenv("FQLA_PROPERTY_SECONDS");
    return text ? std::atof(text) : 20.0;
}

bool fast_backend_exists() { return (", " + backend_names() + ",").find(" cpu,") != std::string::npos; }

// Promises that a case may be asked to keep beyond its values.
void add_properties(Case& c, const Draw& dice) {
    std::int64_t next = 0;
    const auto one_in = [&](std::uint64_t n) { return dice.bits(next++) % n == 0; };
    if (one_in(6)) c.repeat = 3;
    if (one_in(4) && (c.deterministic || c.batch_invariant)) c.threads_bitwise = true;
    // NOTE: checkpoints inside a chunk cut it there, so the bits of a sequence depend on where it has some; a lone one
    // has none.
    const bool whole_chunks = c.checkpoints == Checkpoints::none || c.checkpoints == Checkpoints::chunk_starts;
    const bool lone = c.pool == 0 && c.verify == Verify::none && c.commit && whole_chunks;
    if (one_in(4) && lone) c.alone = true;
    if (c.pass != Pass::forward || c.pool > 0) return;
    if (c.packed()) {
        if (one_in(4) && lone) c.same_packed = true;
        if (one_in(6) && c.checkpoints == Checkpoints::none) c.relens = 3;
    } else if (c.has_initial.empty()) {
        // A 16-bit state is rounded where the call is cut, so that is another computation.
        if (one_in(4) && c.tokens > 1 && c.state == DType::f32) {
            c.split_prefill = 1 + static_cast<std::int64_t>(dice.bits(99) % static_cast<std::uint64_t>(c.tokens - 1));
        }
        if (one_in(6) && c.tokens <= 64 && c.state == DType::f32) c.decode_equals_prefill = true;
    }
}

void run(Pass pass) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds_allowed());
    int done = 0, failures = 0;
    for (std::uint64_t seed = first_seed(); done < kMostCases && failures < 5; ++seed) {
        Case c = random_case(seed);
        if (c.pass != pass) continue;
        if (std::chrono::steady_clock::now() > end) break;
        c.backend = fast_backend_exists() ? "cpu" : "reference";
        Case asked = c;
        add_properties(asked, Draw(seed, 78));
        const std::string line = to_line(asked);
        const Parsed<Case> parsed = parse_case(line);
        // Some promises exclude each other; the plain case is left then.
        if (parsed.ok()) {
            EXPECT_EQ(parsed.value, asked) << line;
            c = asked;
        }
        const Report report = check_case(c);
        if (report.verdict != Verdict::passed) {
            ++failures;
            ADD_FAILURE() << "seed " << seed << "\n" << text_of(report, false);
        }
        ++done;
    }
    EXPECT_GT(done, 0);
    std::printf("%d random cases\n", done);
}

TEST(RandomCases, Forward) { run(Pass::forward); }
TEST(RandomCases, Backward) { run(Pass::backward); }
TEST(RandomCases, Decode) { run(Pass::decode); }

}  // namespace
}  // namespace flashqla::cases
