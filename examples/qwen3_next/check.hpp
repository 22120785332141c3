// Compares this program with what transformers computed, and the library's backends with its oracle.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "flashqla/flashqla.hpp"
#include "model.hpp"

namespace qwen3_next {

double relative_l2(std::span<const float> found, std::span<const float> expected);  // |found - expected| / |expected|

// Rows of `width` values whose largest value is at the same place in both.
std::int64_t agreeing_argmax(std::span<const float> a, std::span<const float> b, std::size_t width);

// reference.safetensors
struct Reference {
    std::string input;                 // 256 bytes
    std::vector<float> logits;         // [256, vocabulary]
    std::string prompt, continuation;  // the greedy continuation
};
Reference load_reference(const std::string& directory);

// The gated delta rule of layer 1 on layer_inputs.safetensors: raw gate, logit beta; q, k, v in bf16 as the file has
// them or, with the same values, in f32.
struct RuleCheck {
    std::vector<double> o_error;  // relative L2 against transformers, one a value head
    std::vector<double> state_error;
    std::vector<float> o;      // [T, Hv, V]
    std::vector<float> state;  // [Hv, K, V]
};
RuleCheck check_rule(const std::string& directory, const std::string& backend, flashqla::DType io);

// Prints a table of errors and limits; true when all are kept.
bool check_all(const Model& model, const std::string& directory, const std::string& backend);

}  // namespace qwen3_next
