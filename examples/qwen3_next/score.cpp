#include "score.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

namespace qwen3_next {
namespace {

// Rows of logits and the bytes that they should have predicted.
void add(Score& score, std::span<const float> logits, std::string_view targets) {
    const std::size_t vocabulary = logits.size() / targets.size();
    for (std::size_t t = 0; t < targets.size(); ++t) {
        const auto row = logits.subspan(t * vocabulary, vocabulary);
        const double largest = std::ranges::max(row);
        double sum = 0;
        for (const float logit : row) sum += std::exp(logit - largest);
        const double nats = largest + std::log(sum) - row[static_cast<unsigned char>(targets[t])];
        score.bits += nats / std::numbers::ln2;
    }
    score.bytes += static_cast<std::int64_t>(targets.size());
}

}  // namespace

Score score_text(Network& network, std::string_view text) {
    Score score;
    network.reset(0);
    const auto most = static_cast<std::size_t>(network.options().max_rows);
    for (std::size_t at = 0; at + 1 < text.size(); at += most) {
        const std::size_t length = std::min(most, text.size() - 1 - at);
        const Piece piece{0, text.substr(at, length)};
        add(score, network.prefill({&piece, 1}, Rows::all), text.substr(at + 1, length));
    }
    return score;
}

Score score_windows(Network& network, std::string_view text, std::int64_t window) {
    Score score;
    const auto length = static_cast<std::size_t>(window);
    std::size_t at = 0;
    while (at + length < text.size()) {
        std::vector<Piece> pieces;
        const std::size_t first = at;
        for (std::int32_t user = 0; user < network.options().users && at + length < text.size(); ++user, at += length) {
            network.reset(user);
            pieces.push_back({user, text.substr(at, length)});
        }
        add(score, network.prefill(pieces, Rows::all), text.substr(first + 1, at - first));
    }
    return score;
}

}  // namespace qwen3_next
