#include "network.hpp"

#include <algorithm>
#include <stdexcept>

#include "layers.hpp"

namespace qwen3_next {

Network::Network(const Model& model, const Options& options)
    : model_(model),
      options_(options),
      gdn_(model.config, options.users, options.max_rows, options.backend),
      started_(static_cast<std::size_t>(options.users)) {
    const Config& c = model.config;
    const std::int64_t rows = std::max<std::int64_t>(options.max_rows, options.users);
    const auto floats = [&](std::int64_t width) { return std::vector<float>(static_cast<std::size_t>(rows * width)); };
    for (std::int64_t i = 0; i < c.layers; ++i) states_.push_back(gdn_.make_state());
    x_ = floats(c.hidden);
    h_ = floats(c.hidden);
    gate_up_ = floats(2 * c.intermediate);
    product_ = floats(c.intermediate);
    logits_ = floats(c.vocabulary);
}

void Network::reset(std::int32_t user) { started_.at(static_cast<std::size_t>(user)) = 0; }

std::span<const float> Network::prefill(std::span<const Piece> pieces, Rows rows) {
    run(pieces, false);
    if (rows == Rows::all) return logits(batch_.rows());
    const std::int64_t hidden = model_.config.hidden;
    for (std::size_t n = 0; n < pieces.size(); ++n) {
        std::copy_n(x_.data() + (batch_.offsets[n + 1] - 1) * hidden, hidden,
                    x_.data() + static_cast<std::int64_t>(n) * hidden);
    }
    return logits(static_cast<std::int64_t>(pieces.size()));
}

std::span<const float> Network::decode(std::span<const Piece> bytes) {
    for (const Piece& byte : bytes) {
        if (byte.text.size() != 1) throw std::runtime_error("Network::decode takes one byte of each user");
    }
    run(bytes, true);
    return logits(batch_.rows());
}

std::span<const float> Network::read(std::int32_t user, std::string_view text) {
    std::span<const float> result;
    while (!text.empty()) {
        const Piece piece{user, text.substr(0, static_cast<std::size_t>(options_.max_rows))};
        result = prefill({&piece, 1}, Rows::last);
        text.remove_prefix(piece.text.size());
    }
    return result;
}

void Network::run(std::span<const Piece> pieces, bool decode) {
    const Config& c = model_.config;
    batch_ = {};
    std::vector<bool> seen(started_.size());
    for (const Piece& piece : pieces) {
        const auto user = static_cast<std::size_t>(piece.user);
        if (piece.text.empty() || user >= seen.size() || seen[user]) {
            throw std::runtime_error("Network: a piece is empty, of an unknown user, or the second of its user");
        }
        seen[user] = true;
        batch_.add(piece.user, static_cast<std::int64_t>(piece.text.size()), started_[user] != 0);
        started_[user] = 1;
    }
    const std::int64_t rows = batch_.rows();
    if (rows > static_cast<std::int64_t>(x_.size()) / c.hidden) {
        throw std::runtime_error("Network: " + std::to_string(rows) + " bytes in one call; Options::max_rows allows " +
                                 std::to_string(options_.max_rows));
    }

    float* row = x_.data();
    for (const Piece& piece : pieces) {
        for (const char byte : piece.text) {
            row = std::copy_n(model_.embedding.data() + static_cast<unsigned char>(byte) * c.hidden, c.hidden, row);
        }
    }
    for (std::size_t i = 0; i < states_.size(); ++i) {
        const LayerWeights& layer = model_.layers[i];
        rms_norm(x_.data(), layer.input_norm.data(), rows, c.hidden, c.eps, h_.data());
        gdn_.run(layer.gdn, batch_, decode, h_.data(), states_[i], x_.data());

        rms_norm(x_.data(), layer.mlp_norm.data(), rows, c.hidden, c.eps, h_.data());
        layer.gate_up.multiply(h_.data(), rows, gate_up_.data());
        silu_times_up(gate_up_.data(), rows, c.intermediate, product_.data());
        layer.down.multiply_and_add(product_.data(), rows, x_.data());
    }
}

std::span<const float> Network::logits(std::int64_t rows) {
    const Config& c = model_.config;
    rms_norm(x_.data(), model_.final_norm.data(), rows, c.hidden, c.eps, h_.data());
    model_.output.multiply(h_.data(), rows, logits_.data());
    return {logits_.data(), static_cast<std::size_t>(rows * c.vocabulary)};
}

}  // namespace qwen3_next
