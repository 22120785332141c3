// The memory of the users: pieces, decode, several users at once, slots that are used again.
#include <gtest/gtest.h>

#include "check.hpp"
#include "fixture.hpp"
#include "generate.hpp"

namespace qwen3_next {
namespace {

constexpr double kTolerance = 1e-5;

void expect_same(const std::vector<float>& found, const std::vector<float>& expected) {
    ASSERT_EQ(found.size(), expected.size());
    EXPECT_LE(relative_l2(found, expected), kTolerance);
    EXPECT_EQ(agreeing_argmax(found, expected, 256), static_cast<std::int64_t>(expected.size()) / 256);
}

class Pieces : public testing::Test {
protected:
    std::string_view text_ = std::string_view(heldout()).substr(1000, 300);
    Network network_{model(), {.users = 1, .max_rows = 300}};
    std::vector<float> whole_ = logits_in_pieces(network_, 0, text_, {300});
};

TEST_F(Pieces, OfOddLengths) { expect_same(logits_in_pieces(network_, 0, text_, {1, 7, 64, 13, 2, 65, 63}), whole_); }

TEST_F(Pieces, OfOneByte) { expect_same(logits_in_pieces(network_, 0, text_, {1}), whole_); }

TEST_F(Pieces, DecodedByteByByte) {
    std::vector<float> decoded;
    network_.reset(0);
    for (std::size_t t = 0; t < text_.size(); ++t) {
        const Piece byte{0, text_.substr(t, 1)};
        const auto logits = network_.decode({&byte, 1});
        decoded.insert(decoded.end(), logits.begin(), logits.end());
    }
    expect_same(decoded, whole_);
}

TEST_F(Pieces, PrefillThenDecode) {
    network_.reset(0);
    network_.read(0, text_.substr(0, 299));
    const Piece byte{0, text_.substr(299)};
    const auto logits = network_.decode({&byte, 1});
    expect_same({logits.begin(), logits.end()}, {whole_.end() - 256, whole_.end()});
}

TEST_F(Pieces, LongerThanACall) {
    Network small(model(), {.users = 1, .max_rows = 50});
    const auto logits = small.read(0, text_);
    expect_same({logits.begin(), logits.end()}, {whole_.end() - 256, whole_.end()});
}

TEST(Users, GenerateTogetherWhatEachGeneratesAlone) {
    const std::vector<std::string> prompts{"def read(self, ", "import ", "class Node:\n    \"\"\"", "for i in r", "x"};
    constexpr std::int64_t kBytes = 80;
    const auto samplers = [](std::size_t first, std::size_t count) {
        std::vector<Sampler> result;
        for (std::size_t n = first; n < first + count; ++n) result.emplace_back(n % 2 ? 0.6f : 0.0f, n);
        return result;
    };
    Network together(model(), {.users = 5, .max_rows = 64});
    auto all = samplers(0, prompts.size());
    const Generation result = generate(together, prompts, kBytes, all);
    for (std::size_t n = 0; n < prompts.size(); ++n) {
        Network alone(model(), {.users = 1, .max_rows = 64});
        auto own = samplers(n, 1);
        const Generation single = generate(alone, {&prompts[n], 1}, kBytes, own);
        EXPECT_EQ(result.texts[n], single.texts[0]) << "user " << n;
        EXPECT_EQ(result.texts[n].size(), static_cast<std::size_t>(kBytes));
    }
}

// A packed call with pieces of several users equals a call for each; users in any order, some absent.
TEST(Users, PackedPrefill) {
    const std::string_view text = heldout();
    const std::vector<Piece> first{{2, text.substr(0, 70)}, {0, text.substr(500, 3)}, {3, text.substr(900, 129)}};
    const std::vector<Piece> second{{3, text.substr(1029, 1)}, {2, text.substr(70, 64)}};
    Network packed(model(), {.users = 4, .max_rows = 256});
    Network separate(model(), {.users = 4, .max_rows = 256});
    for (const auto& pieces : {first, second}) {
        std::vector<float> expected;
        for (const Piece& piece : pieces) {
            const auto logits = separate.prefill({&piece, 1}, Rows::all);
            expected.insert(expected.end(), logits.begin(), logits.end());
        }
        const auto logits = packed.prefill(pieces, Rows::all);
        expect_same({logits.begin(), logits.end()}, expected);
    }
}

// A user of a decode call may be absent; its memory stays as it was.
TEST(Users, DecodeOfSome) {
    const std::string_view text = std::string_view(heldout()).substr(2000, 40);
    Network network(model(), {.users = 3, .max_rows = 64});
    network.read(1, text.substr(0, 39));
    for (std::int32_t i = 0; i < 5; ++i) {
        const std::vector<Piece> others{{2, text.substr(0, 1)}, {0, text.substr(1, 1)}};
        network.decode(others);
    }
    const Piece last{1, text.substr(39)};
    const auto found = network.decode({&last, 1});
    const std::vector<float> kept(found.begin(), found.end());
    Network fresh(model(), {.users = 1, .max_rows = 64});
    const auto expected = fresh.read(0, text);
    expect_same(kept, {expected.begin(), expected.end()});
}

TEST(Users, ResetForgetsEverything) {
    const std::string_view text = std::string_view(heldout()).substr(3000, 20);
    Network network(model(), {.users = 2, .max_rows = 64});
    const std::vector<float> fresh = logits_in_pieces(network, 1, text, {20});
    network.read(1, std::string(500, '\x80'));
    expect_same(logits_in_pieces(network, 1, text, {20}), fresh);
    network.reset(1);
    const Piece byte{1, text.substr(0, 1)};
    const auto logits = network.decode({&byte, 1});
    expect_same({logits.begin(), logits.end()}, {fresh.begin(), fresh.begin() + 256});
}

TEST(Users, WrongCallsAreRefused) {
    Network network(model(), {.users = 2, .max_rows = 8});
    const auto refused = [&](const std::vector<Piece>& pieces) {
        EXPECT_THROW(network.prefill(pieces, Rows::last), std::runtime_error);
    };
    refused({{2, "a"}});
    refused({{-1, "a"}});
    refused({{0, ""}});
    refused({{0, "a"}, {0, "b"}});
    refused({{0, "123456789"}});
    const Piece two{0, "ab"};
    EXPECT_THROW(network.decode({&two, 1}), std::runtime_error);
}

}  // namespace
}  // namespace qwen3_next
