#include "api/problem.hpp"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "api/text.hpp"

namespace flashqla {
namespace {

// No tensor may have more elements. Far above any memory, and low enough that every product of sizes, and every
// workspace figure made of them, fits in 64 bits.
constexpr std::int64_t kMaxElements = std::int64_t{1} << 48;

template <class... Parts>
Status bad(const Parts&... parts) {
    return {Code::invalid_argument, say("flashqla::Plan::create: ", parts...)};
}

// Product of non-negative factors, or -1 when it passes kMaxElements.
std::int64_t elements(std::initializer_list<std::int64_t> factors) noexcept {
    std::int64_t product = 1;
    for (const std::int64_t factor : factors) {
        if (factor == 0) return 0;
        if (product > kMaxElements / factor) product = -1;
        if (product < 0) break;
        product *= factor;
    }
    // A zero later in the list still makes the tensor empty.
    if (product < 0 && std::count(factors.begin(), factors.end(), 0) > 0) return 0;
    return product;
}

// Enumerations arrive as plain integers through the C interface.
template <class E>
bool in_range(E value, E last) noexcept {
    const auto number = static_cast<std::int32_t>(value);
    return number >= 0 && number <= static_cast<std::int32_t>(last);
}

Status validate_sizes(const Problem& p) {
    if (p.batch < 0) return bad("batch is ", p.batch, "; it must be 0 or more");
    if (p.tokens < 0) return bad("tokens is ", p.tokens, "; it must be 0 or more");
    if (p.sequences < 0) {
        return bad("sequences is ", p.sequences, "; it must be 0 (fixed length) or the number of packed sequences");
    }
    if (packed(p) && p.batch != 1) {
        return bad("batch is ", p.batch, " with ", p.sequences, " packed sequences; a packed problem needs batch 1");
    }
    const struct {
        const char* name;
        std::int32_t value;
    } sizes[] = {{"heads_k", p.heads_k}, {"heads_v", p.heads_v}, {"dim_k", p.dim_k}, {"dim_v", p.dim_v}};
    for (const auto& size : sizes) {
        if (size.value < 1) return bad(size.name, " is ", size.value, "; it must be 1 or more");
    }
    if (p.heads_v % p.heads_k != 0) {
        return bad("heads_v is ", p.heads_v, "; it must be a multiple of heads_k, which is ", p.heads_k);
    }
    const std::int64_t rows = sequence_count(p);
    const struct {
        const char* name;
        std::int64_t count;
    } tensors[] = {
        {"q (batch x tokens x heads_k x dim_k)", elements({p.batch, p.tokens, p.heads_k, p.dim_k})},
        {"v (batch x tokens x heads_v x dim_v)", elements({p.batch, p.tokens, p.heads_v, p.dim_v})},
        {"a state tensor (sequences x heads_v x dim_k x dim_v)", elements({rows, p.heads_v, p.dim_k, p.dim_v})},
        {"cu_seqlens (sequences + 1)", elements({rows})},
        {"a token dimension (tokens)", elements({p.tokens})},
        {"a state (heads_v x dim_k x dim_v)", elements({p.heads_v, p.dim_k, p.dim_v})},
    };
    for (const auto& tensor : tensors) {
        if (tensor.count < 0) {
            return bad("the size of ", tensor.name, " is absurd; at most 2^48 elements are allowed in a tensor");
        }
    }
    return {};
}

Status validate_modes(const Problem& p) {
    if (p.io != DType::f32 && p.io != DType::f16 && p.io != DType::bf16) {
        return bad("io is ", dtype_text(p.io), "; q, k and v may be f32, f16 or bf16");
    }
    if (p.out != DType::none && p.out != p.io && p.out != DType::f32) {
        return bad("out is ", dtype_text(p.out), "; o may be ", name_of(p.io), " as io is, or f32");
    }
    const struct {
        const char* name;
        std::int32_t value;
        bool valid;
    } modes[] = {
        {"gate", static_cast<std::int32_t>(p.gate), in_range(p.gate, Gate::vector)},
        {"beta_mode", static_cast<std::int32_t>(p.beta_mode), in_range(p.beta_mode, BetaMode::logit)},
        {"grouping", static_cast<std::int32_t>(p.grouping), in_range(p.grouping, Grouping::tiled)},
        {"state_layout", static_cast<std::int32_t>(p.state_layout), in_range(p.state_layout, StateLayout::vk)},
        {"pad_rule", static_cast<std::int32_t>(p.pad_rule), in_range(p.pad_rule, PadRule::non_positive)},
        {"checkpoints", static_cast<std::int32_t>(p.checkpoints), in_range(p.checkpoints, Checkpoints::listed)},
    };
    for (const auto& mode : modes) {
        if (!mode.valid) return bad(mode.name, " is ", mode.value, ", which is not a value of its enumeration");
    }
    if (p.beta_factor != 1.0f && p.beta_factor != 2.0f) {
        return bad("beta_factor is ", p.beta_factor, "; it must be 1, or 2 for negative eigenvalues");
    }
    if (!std::isfinite(p.l2norm_eps) || p.l2norm_eps < 0.0f) {
        return bad("l2norm_eps is ", p.l2norm_eps, "; it must be finite and 0 or more");
    }
    if (!std::isfinite(p.scale)) {
        return bad("scale is ", p.scale, "; it must be finite (0 stands for dim_k^-1/2)");
    }
    if (p.checkpoints == Checkpoints::every_n && p.checkpoint_every < 1) {
        return bad("checkpoint_every is ", p.checkpoint_every, "; Checkpoints::every_n needs 1 or more");
    }
    if (p.checkpoints != Checkpoints::every_n && p.checkpoint_every != 0) {
        return bad("checkpoint_every is ", p.checkpoint_every, "; only Checkpoints::every_n uses it");
    }
    if (p.decode_rows < 0 || p.decode_rows > p.sequences) {
        return bad("decode_rows is ", p.decode_rows, "; it must be between 0 and sequences, which is ", p.sequences);
    }
    return {};
}

}  // namespace

Status validate(const Problem& problem, Device device, const PlanOptions& options) {
    if (device.type != DeviceType::cpu && device.type != DeviceType::cuda) {
        return bad("device is of ", name_of(device), "; it must be cpu (1) or cuda (2)");
    }
    if (device.index < 0) return bad("device index is ", device.index, "; it must be 0 or more");
    if (options.threads < 0) return bad("options.threads is ", options.threads, "; it must be 0 (automatic) or more");
    if (options.context_split < 0) {
        return bad("options.context_split is ", options.context_split, "; it must be 0 (automatic) or more");
    }
    if (Status status = validate_sizes(problem); !status.ok()) return status;
    return validate_modes(problem);
}

Problem with_defaults(const Problem& problem) noexcept {
    Problem filled = problem;
    if (filled.out == DType::none) filled.out = filled.io;
    if (filled.scale == 0.0f) filled.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(filled.dim_k)));
    return filled;
}

std::int64_t checkpoint_rows_of(const Problem& problem, std::int64_t length) noexcept {
    switch (problem.checkpoints) {
        case Checkpoints::chunk_starts: return (length + kChunk - 1) / kChunk;
        case Checkpoints::every_n: return length / problem.checkpoint_every;
        default: return 0;
    }
}

std::int64_t checkpoint_bound(const Problem& problem) noexcept {
    if (!packed(problem)) return problem.batch * checkpoint_rows_of(problem, problem.tokens);
    if (problem.checkpoints != Checkpoints::chunk_starts) return checkpoint_rows_of(problem, problem.tokens);
    // Each of at most min(N, T) non-empty sequences rounds up by at most 63 tokens.
    const std::int64_t sequences = std::min(problem.sequences, problem.tokens);
    return (problem.tokens + sequences * (kChunk - 1)) / kChunk;
}

}  // namespace flashqla
