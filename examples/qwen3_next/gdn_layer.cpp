#include "gdn_layer.hpp"

#include <algorithm>
#include <chrono>
#include <memory>

#include "layers.hpp"

namespace qwen3_next {
namespace {

using flashqla::DType;
using flashqla::TensorView;

flashqla::Problem problem_of(const Config& config) {
    return {
        .heads_k = config.heads_k,
        .heads_v = config.heads_v,
        .dim_k = config.dim_k,
        .dim_v = config.dim_v,
        .io = DType::f32,
        .gate = flashqla::Gate::raw,
        .beta_mode = flashqla::BetaMode::logit,
        .qk_l2norm = true,
    };
}

// A short batch filled up to what the plan expects: empty sequences in padding slots.
Batch padded(Batch batch, std::int32_t users, std::int64_t rows_each) {
    while (static_cast<std::int32_t>(batch.slots.size()) < users) batch.add(-1, rows_each, false);
    return batch;
}

constexpr std::size_t kAlignment = 64;

}  // namespace

GdnEngine::GdnEngine(const Config& config, std::int32_t users, std::int64_t max_rows, const std::string& backend)
    : config_(config), users_(users), max_rows_(std::max<std::int64_t>(max_rows, users)) {
    // Packed: any number of sequences of any lengths, as long as they fit into max_rows.
    flashqla::Problem prefill = problem_of(config);
    prefill.tokens = max_rows_;
    prefill.sequences = users;
    prefill_plan_ = flashqla::check(flashqla::Plan::create(prefill, {}, {.backend = backend}));

    flashqla::Problem decode = problem_of(config);
    decode.batch = users;
    decode.tokens = 1;
    decode_plan_ = flashqla::check(flashqla::Plan::create(decode, {}, {.backend = backend}));

    workspace_.resize(kAlignment + std::max(prefill_plan_.workspace_bytes(flashqla::Pass::forward),
                                            decode_plan_.workspace_bytes(flashqla::Pass::decode)));
    projected_.resize(static_cast<std::size_t>(max_rows_ * config.projection()));
    mixed_.resize(static_cast<std::size_t>(max_rows_ * config.conv_channels()));
    o_.resize(static_cast<std::size_t>(max_rows_ * config.value_size()));
}

GdnState GdnEngine::make_state() const {
    GdnState state;
    state.pool.resize(static_cast<std::size_t>(users_ * config_.value_size() * config_.dim_k));
    state.history.resize(static_cast<std::size_t>(users_ * (config_.conv_width - 1) * config_.conv_channels()));
    return state;
}

void GdnEngine::run(const GdnWeights& weights, const Batch& batch, bool decode, const float* h, GdnState& state,
                    float* x) {
    const Config& c = config_;
    weights.in_proj.multiply(h, batch.rows(), projected_.data());

    const std::int64_t history_size = (c.conv_width - 1) * c.conv_channels();
    const Convolution convolution{weights.conv.data(), c.conv_width, c.conv_channels()};
    for (std::size_t n = 0; n < batch.slots.size(); ++n) {
        float* history = state.history.data() + batch.slots[n] * history_size;
        if (!batch.has_initial[n]) std::fill_n(history, history_size, 0.0f);
        convolve(convolution, projected_.data() + batch.offsets[n] * c.projection(), c.projection(),
                 batch.offsets[n + 1] - batch.offsets[n], history,
                 mixed_.data() + batch.offsets[n] * c.conv_channels());
    }

    const auto start = std::chrono::steady_clock::now();
    decode ? decode_rule(weights, batch, state) : prefill_rule(weights, batch, state);
    rule_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

    gated_rms_norm(o_.data(), projected_.data() + c.conv_channels(), c.projection(), weights.norm.data(), batch.rows(),
                   c.heads_v, c.dim_v, c.eps);
    weights.out_proj.multiply_and_add(o_.data(), batch.rows(), x);
}

GdnEngine::Inputs GdnEngine::inputs(const GdnWeights& weights, std::int64_t batch, std::int64_t tokens) const {
    const Config& c = config_;
    // Slices of the rows that the convolution wrote, and of the projection's rows. Nothing is copied.
    const auto heads = [&](const float* first, std::int64_t count, std::int64_t dim, std::int64_t row) {
        return flashqla::tensor(first, DType::f32, {batch, tokens, count, dim}, {tokens * row, row, dim, 1});
    };
    const auto scalars = [&](const float* first, std::int64_t row) {
        return flashqla::tensor(first, DType::f32, {batch, tokens, c.heads_v}, {tokens * row, row, 1});
    };
    const float* gates = projected_.data() + c.conv_channels() + c.value_size();  // b | a
    return {
        .q = heads(mixed_.data(), c.heads_k, c.dim_k, c.conv_channels()),                     // [B,T,Hk,K]
        .k = heads(mixed_.data() + c.key_size(), c.heads_k, c.dim_k, c.conv_channels()),      // [B,T,Hk,K]
        .v = heads(mixed_.data() + 2 * c.key_size(), c.heads_v, c.dim_v, c.conv_channels()),  // [B,T,Hv,V]
        .g = scalars(gates + c.heads_v, c.projection()),                                      // [B,T,Hv]
        .beta = scalars(gates, c.projection()),                                               // [B,T,Hv]
        .A_log = flashqla::tensor(weights.A_log.data(), DType::f32, {c.heads_v}),
        .dt_bias = flashqla::tensor(weights.dt_bias.data(), DType::f32, {c.heads_v}),
        .o = heads(o_.data(), c.heads_v, c.dim_v, c.value_size()),  // [B,T,Hv,V]
    };
}

void GdnEngine::prefill_rule(const GdnWeights& weights, const Batch& batch, GdnState& state) {
    const Inputs in = inputs(weights, 1, max_rows_);
    const Batch all = padded(batch, users_, 0);
    const flashqla::ForwardArgs args{
        .q = in.q,
        .k = in.k,
        .v = in.v,
        .g = in.g,
        .beta = in.beta,
        .A_log = in.A_log,
        .dt_bias = in.dt_bias,
        .cu_seqlens = flashqla::tensor(all.offsets.data(), DType::i32, {users_ + 1}),
        .initial_state = pool_view(state),
        .final_state = pool_view(state),
        .state_indices = flashqla::tensor(all.slots.data(), DType::i32, {users_}),
        .state_indices_out = {},
        .has_initial_state = flashqla::tensor(all.has_initial.data(), DType::u8, {users_}),
        .checkpoints = {},
        .checkpoint_list = {},
        .o = in.o,
    };
    flashqla::check(flashqla::forward(prefill_plan_, args, workspace()));
}

void GdnEngine::decode_rule(const GdnWeights& weights, const Batch& batch, GdnState& state) {
    const Inputs in = inputs(weights, users_, 1);
    const Batch all = padded(batch, users_, 1);
    flashqla::DecodeArgs args;
    args.q = in.q;
    args.k = in.k;
    args.v = in.v;
    args.g = in.g;
    args.beta = in.beta;
    args.A_log = in.A_log;
    args.dt_bias = in.dt_bias;
    args.state = pool_view(state);
    args.state_indices = flashqla::tensor(all.slots.data(), DType::i32, {users_});
    args.has_initial_state = flashqla::tensor(all.has_initial.data(), DType::u8, {users_});
    args.o = in.o;
    flashqla::check(flashqla::decode(decode_plan_, args, workspace()));
}

TensorView GdnEngine::pool_view(const GdnState& state) const {
    return flashqla::tensor(state.pool.data(), DType::f32, {users_, config_.heads_v, config_.dim_k, config_.dim_v});
}

flashqla::Workspace GdnEngine::workspace() {
    void* data = workspace_.data();
    std::size_t bytes = workspace_.size();
    std::align(kAlignment, bytes - kAlignment, data, bytes);
    return {data, bytes};
}

}  // namespace qwen3_next
