#include "cases/tolerance.hpp"

#include <algorithm>
#include <cmath>

namespace flashqla::cases {
namespace {

// Relative L2 error that rounding to the format alone gives: for bf16 1.7e-3 over many elements of equal weight, at
// most 2^-8 for an unlucky single one. Small outputs, and those that decay leaves a few large elements, lie between.
double rounding(DType stored, std::int64_t elements) {
    if (stored != DType::bf16 && stored != DType::f16) return 0;
    const double n = static_cast<double>(std::max<std::int64_t>(elements, 1));
    const double bf16 = std::min(2.0e-3 * (1.0 + 3.0 / std::sqrt(n)), 0x1p-8);
    return stored == DType::bf16 ? bf16 : bf16 / 8;
}

// Errors of the best peers with bf16 inputs, output rounding included (design: numerics).
double bf16_error(std::string_view output) {
    if (output == "o") return 3.7e-3;
    if (output == "d_q") return 3.93e-3;
    if (output == "d_k") return 5.28e-3;
    if (output == "d_v") return 3.56e-3;
    if (output == "d_beta") return 3.77e-3;
    if (output == "d_g" || output == "d_A_log" || output == "d_dt_bias") return 4.55e-3;
    if (output == "d_initial_state") return 2.28e-3;
    return 3.6e-3;  // states and checkpoints
}

}  // namespace

Tolerance tolerance(const Case& c, std::string_view output, DType stored, std::int64_t head_elements) {
    Tolerance t;
    // The matrix units of a GPU round what they multiply, deltas and gradients too: an fp32 number to two bf16 parts,
    // 16 bits. The project asks for 1e-4 there.
    const bool rounds = c.device.type == DeviceType::cuda;
    const double kF32 = rounds ? 1e-4 : 1e-5;
    // One inner product a token: of a short sequence, its few large ones decide.
    const bool by_gate = output == "d_g" || output == "d_beta";
    const double round = rounding(stored, by_gate ? head_elements / 4 : head_elements);
    const double few = 1.0 / std::sqrt(static_cast<double>(std::max<std::int64_t>(head_elements, 1)));
    if (c.io == DType::f32) {
        t.whole = kF32 + round;
    } else {
        // The figures of token outputs include their rounding, those of states are for f32 states.
        const bool by_token = output == "o" || output == "d_q" || output == "d_k" || output == "d_v";
        const double bf16 = by_token ? bf16_error(output) : std::hypot(bf16_error(output), round);
        // Eight times the significand, and never below what f32 arithmetic gives.
        t.whole = c.io == DType::bf16 ? bf16 : std::max(bf16 / 8, kF32) + (stored == DType::f16 ? 0 : round);
        // A chunk takes from the adjoint of the state what lies along its keys: with 32 tokens and fewer channels
        // nearly everything, and what is left is a small difference of rounded numbers. The peers' figure is for K =
        // 128.
        if (output == "d_initial_state" && c.dim_k < 128) t.whole *= 1.0 + 32.0 / static_cast<double>(c.dim_k);
        // Where a plan cuts a sequence, this gradient passes through transitions, which take part with what rounded
        // operands make of them; the peers' figure is for sequences in one piece.
        if (rounds && output == "d_initial_state") t.whole *= 1.2;
        // They are averages over many elements; few elements scatter.
        if (head_elements < 4096) t.whole *= 1.0 + (rounds ? 12.0 : 4.0) * few + (by_gate ? 64.0 * few * few : 0.0);
        // Keys of few channels are nearly parallel, so that deltas are differences as with identical keys.
        if (rounds && c.dim_k <= 32) t.whole *= 1.0 + 4.0 / static_cast<double>(c.dim_k);
        t.whole = std::max(t.whole, kF32 + round);
    }
    // All keys identical: each token replaces the value of the one before, so a chunk adds up 64 differences that were
    // rounded one by one. With beta = 2 the old value changes sign instead of going away, and the rounding of every
    // token so far stays.
    if (c.keys == Keys::same) t.whole *= c.negative ? std::max(4.0, std::sqrt(static_cast<double>(c.tokens))) : 4.0;
    if (c.keys == Keys::same && rounds) t.whole *= 4.0;
    // Outputs that fp16 cannot hold are not counted, and what is left is small beside the state.
    if (c.io == DType::f16 && rounds && c.initial_scale > 65504) t.whole *= 2.0;
    // A branch of a token tree continues from its parent's state as it was stored.
    if (c.verify == Verify::tree) t.whole = std::hypot(t.whole, 1.5 * rounding(c.state, head_elements));
    // With 16-bit inputs one head has fewer roundings to average over than the whole.
    t.per_head = c.io == DType::f32 && !rounds ? t.whole : 2 * t.whole;
    // Every element is a sum that may cancel by chance: the fewer elements, the likelier that all of a head do. Gate
    // gradients are inner products of a whole state and its gradient, which cancel most.
    const bool gate_gradient = output == "d_g" || output == "d_A_log" || output == "d_dt_bias";
    t.floor = gate_gradient ? 1e-2 + 0.3 * few : 1e-3 + 0.1 * few;
    // Terms that were rounded leave more than terms that were not when they cancel.
    if (rounds && c.pass == Pass::backward) t.floor = std::min(1.0, 3.0 * t.floor + 0.3 * few);
    // The gradient of beta is an inner product and a sum over earlier tokens, which cancel too.
    if (output == "d_beta") t.floor = 2e-2 + 0.1 * few;
    t.absolute = stored == DType::f16 ? 0x1p-25 : 1e-37;
    if (gate_gradient) {
        // The terms are of size 1, as v and d_o are. Identical keys (K = 1 has no others) and beta = 1 replace the
        // state, so its decay has no effect at all and the terms add up to zero.
        const bool identical = c.keys == Keys::same || (c.dim_k == 1 && c.keys == Keys::unit);
        const double of_term = c.io == DType::f32 ? (rounds ? 1e-3 : 4e-5) : c.io == DType::f16 ? 5e-4 : 2e-2;
        t.absolute = identical ? of_term : 2e-7;
    }
    // The gradient of q of one token is an inner product for each value head, times a key. Of few tokens all of these
    // may cancel, in the whole output as well, and then nothing is left to compare with. Their terms are of size 1, as
    // v and d_o are, and each may have the rounding of the delta in it.
    if (rounds && output == "d_q" && c.io != DType::f32) {
        const double keys = c.dim_k, terms = static_cast<double>(c.dim_v) * c.heads_v / c.heads_k;
        const double tokens = std::max(static_cast<double>(head_elements) / keys, 1.0);
        const double scale = c.scale != 0 ? std::abs(c.scale) : 1.0 / std::sqrt(keys);
        const double step = c.io == DType::bf16 ? 0x1p-8 : 0x1p-11;
        t.absolute = std::max(t.absolute, step * scale * std::sqrt(terms / keys) / tokens);
    }
    return t;
}

}  // namespace flashqla::cases
