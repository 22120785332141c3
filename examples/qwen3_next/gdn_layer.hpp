// The Gated Delta Net of a layer: projections and convolution around flashqla::forward and flashqla::decode.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "flashqla/flashqla.hpp"
#include "model.hpp"

namespace qwen3_next {

// Rows of several sequences, one after another, and the slot of the pool that holds each sequence's state.
struct Batch {
    std::vector<std::int32_t> offsets{0};   // [N+1], the library's cu_seqlens
    std::vector<std::int32_t> slots;        // [N]
    std::vector<std::uint8_t> has_initial;  // [N], 0: the sequence starts here, whatever the slot holds

    void add(std::int32_t slot, std::int64_t rows, bool continues) {
        slots.push_back(slot);
        has_initial.push_back(continues);
        offsets.push_back(offsets.back() + static_cast<std::int32_t>(rows));
    }
    std::int64_t rows() const { return offsets.back(); }
};

// What one layer remembers of every user.
struct GdnState {
    std::vector<float> pool;     // [users, Hv, K, V]
    std::vector<float> history;  // [users, width-1, channels], inputs of the convolution
};

// Plans, workspace and buffers, made once and shared by all layers of a network. Not for two threads at once.
class GdnEngine {
public:
    // At most `users` sequences and `max_rows` rows a call. backend "" lets the library choose.
    GdnEngine(const Config& config, std::int32_t users, std::int64_t max_rows, const std::string& backend);

    GdnState make_state() const;

    // x [rows,D] += GDN(h [rows,D]). With `decode` every sequence of the batch has one row.
    void run(const GdnWeights& weights, const Batch& batch, bool decode, const float* h, GdnState& state, float* x);

    double rule_seconds() const { return rule_seconds_; }  // spent inside the library since the engine was made
    const flashqla::Plan& prefill_plan() const { return prefill_plan_; }

private:
    // q, k, v, g and beta as the library sees them; [B,T,..] with `batch` = B and `tokens` = T.
    struct Inputs {
        flashqla::TensorView q, k, v, g, beta, A_log, dt_bias, o;
    };
    Inputs inputs(const GdnWeights& weights, std::int64_t batch, std::int64_t tokens) const;
    void prefill_rule(const GdnWeights& weights, const Batch& batch, GdnState& state);
    void decode_rule(const GdnWeights& weights, const Batch& batch, GdnState& state);
    flashqla::TensorView pool_view(const GdnState& state) const;
    flashqla::Workspace workspace();

    Config config_;
    std::int32_t users_;
    std::int64_t max_rows_;
    flashqla::Plan prefill_plan_, decode_plan_;
    std::vector<std::byte> workspace_;
    std::vector<float> projected_;  // [rows, projection]: q | k | v | z | b | a
    std::vector<float> mixed_;      // [rows, channels]: q | k | v after the convolution
    std::vector<float> o_;          // [rows, Hv, V]
    double rule_seconds_ = 0;
};

}  // namespace qwen3_next
