// The whole network with the memory of several users: prefill of pieces of text, decode of one byte for each user.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gdn_layer.hpp"
#include "model.hpp"

namespace qwen3_next {

// Part of a user's text; what came before it is in the user's state. A byte is a token id.
struct Piece {
    std::int32_t user = 0;
    std::string_view text;
};

enum class Rows { all, last };  // whose logits are wanted: every byte's, or the last byte's of each piece

class Network {
public:
    struct Options {
        std::int32_t users = 1;
        std::int64_t max_rows = 1024;  // bytes in one prefill call, all pieces together
        std::string backend{};         // of the gated delta rule; "" lets the library choose
    };
    Network(const Model& model, const Options& options);  // the model must outlive the network

    void reset(std::int32_t user);  // the user's next piece starts a new text

    // Both return logits [rows, vocabulary], row after row, valid until the next call.
    std::span<const float> prefill(std::span<const Piece> pieces, Rows rows);  // at most one piece a user
    std::span<const float> decode(std::span<const Piece> bytes);               // pieces of one byte

    // A text of any length for one user; returns the logits [vocabulary] behind its last byte.
    std::span<const float> read(std::int32_t user, std::string_view text);

    const Options& options() const { return options_; }
    const GdnEngine& gdn() const { return gdn_; }

private:
    void run(std::span<const Piece> pieces, bool decode);
    std::span<const float> logits(std::int64_t rows);  // of the first rows of x_

    const Model& model_;
    Options options_;
    GdnEngine gdn_;
    std::vector<GdnState> states_;       // one a layer
    std::vector<std::uint8_t> started_;  // [users]
    Batch batch_;
    std::vector<float> x_;        // [rows, D], the residual stream
    std::vector<float> h_;        // [rows, D], normalised
    std::vector<float> gate_up_;  // [rows, 2 F]
    std::vector<float> product_;  // [rows, F]
    std::vector<float> logits_;   // [rows, vocabulary]
};

}  // namespace qwen3_next
