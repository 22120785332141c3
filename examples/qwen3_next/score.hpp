// Bits per byte: the mean of -log2 p(byte | what came before it).
#pragma once

#include <cstdint>
#include <string_view>

#include "network.hpp"

namespace qwen3_next {

struct Score {
    double bits = 0;  // in all
    std::int64_t bytes = 0;
    double per_byte() const { return bytes ? bits / static_cast<double>(bytes) : 0; }
};

// The text as one sequence; every byte but the first is predicted.
Score score_text(Network& network, std::string_view text);

// Full windows of `window` + 1 bytes, each from a zero state; neighbours share a byte. One window a user at a time,
// all users in one packed call, hence max_rows must be at least users * window.
Score score_windows(Network& network, std::string_view text, std::int64_t window);

}  // namespace qwen3_next
