// A Qwen3-Next checkpoint: configuration and weights, ready for use. Throws std::runtime_error with one sentence.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "matrix.hpp"

namespace qwen3_next {

// config.json, with this program's letters.
struct Config {
    std::int64_t layers = 0;
    std::int64_t hidden = 0;        // D
    std::int64_t intermediate = 0;  // F
    std::int64_t vocabulary = 0;
    std::int32_t heads_k = 0, heads_v = 0;  // Hk, Hv
    std::int32_t dim_k = 0, dim_v = 0;      // K, V
    std::int64_t conv_width = 0;
    float eps = 0;
    bool tied = false;  // the output matrix is the embedding

    std::int64_t key_size() const { return std::int64_t{heads_k} * dim_k; }
    std::int64_t value_size() const { return std::int64_t{heads_v} * dim_v; }
    std::int64_t conv_channels() const { return 2 * key_size() + value_size(); }              // q | k | v
    std::int64_t projection() const { return conv_channels() + value_size() + 2 * heads_v; }  // q | k | v | z | b | a
};

// The Gated Delta Net of a layer. The checkpoint stores the rows of its projections by key head; here they are sorted
// so that one product gives q | k | v | z | b | a and every part is a plain slice.
struct GdnWeights {
    Matrix in_proj;              // [projection, D]
    std::vector<float> conv;     // [width, channels]
    std::vector<float> A_log;    // [Hv]
    std::vector<float> dt_bias;  // [Hv]
    std::vector<float> norm;     // [V]
    Matrix out_proj;             // [D, Hv V]
};

struct LayerWeights {
    std::vector<float> input_norm;  // [D], 1 + w
    GdnWeights gdn;
    std::vector<float> mlp_norm;  // [D], 1 + w
    Matrix gate_up;               // [2 F, D]
    Matrix down;                  // [D, F]
};

struct Model {
    Config config;
    std::vector<float> embedding;  // [vocabulary, D]
    std::vector<LayerWeights> layers;
    std::vector<float> final_norm;  // [D], 1 + w
    Matrix output;                  // [vocabulary, D]
    std::int64_t parameters = 0;
};

Config load_config(const std::string& path);
Model load_model(const std::string& directory);  // config.json and model.safetensors in f32, f16 or bf16

}  // namespace qwen3_next
