// The model beside the program, loaded once a process.
#pragma once

#include <algorithm>
#include <fstream>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "network.hpp"

namespace qwen3_next {

inline const std::string kDirectory = QWEN3_NEXT_MODEL;

inline const Model& model() {
    static const Model loaded = load_model(kDirectory);
    return loaded;
}

inline const std::string& heldout() {
    static const std::string text = [] {
        std::ostringstream content;
        content << std::ifstream(kDirectory + "/heldout.txt", std::ios::binary).rdbuf();
        return content.str();
    }();
    return text;
}

// Logits of every byte of a text, read in pieces of these lengths, over and over.
inline std::vector<float> logits_in_pieces(Network& network, std::int32_t user, std::string_view text,
                                           const std::vector<std::size_t>& lengths) {
    std::vector<float> all;
    network.reset(user);
    for (std::size_t i = 0; !text.empty(); ++i) {
        const Piece piece{user, text.substr(0, std::min(lengths[i % lengths.size()], text.size()))};
        const auto logits = network.prefill({&piece, 1}, Rows::all);
        all.insert(all.end(), logits.begin(), logits.end());
        text.remove_prefix(piece.text.size());
    }
    return all;
}

}  // namespace qwen3_next
