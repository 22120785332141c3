// Scratch memory of the backward pass: what a key head, its value heads and a chunk keep. Compiled per target.

// NOTE: the guard toggles, see simd-inl.hpp.
#if defined(FQLA_CPU_BACKWARD_SCRATCH_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FQLA_CPU_BACKWARD_SCRATCH_INL_HPP_
#undef FQLA_CPU_BACKWARD_SCRATCH_INL_HPP_
#else
#define FQLA_CPU_BACKWARD_SCRATCH_INL_HPP_
#endif

#include <algorithm>

#include "cpu/backward_products-inl.hpp"
#include "cpu/chunk-inl.hpp"
#include "cpu/gates-inl.hpp"
#include "cpu/simd-inl.hpp"

FQLA_BEGIN_TARGET
namespace flashqla::cpu {
namespace HWY_NAMESPACE {

// Whether what one head keeps from the first pass to the second outgrows a second-level cache.
HWY_INLINE bool is_long(std::size_t tokens) { return tokens > 512; }

// Value heads of a group that go through the chunks together. Two share the key head's operands and gradients, and the
// pages of the caller's rows; but each keeps a state a chunk, and a short sequence of one head stays nearer to the
// core.
HWY_INLINE std::size_t heads_at_once(std::size_t tokens, std::size_t group) {
    // Measured on Zen 4: one is 5 % faster at 512 tokens, two are 9 % at 2048.
    return std::min<std::size_t>(is_long(tokens) ? 2 : 1, group);
}

HWY_INLINE std::size_t whole_strips(std::size_t n) {
    const std::size_t s = std::max<std::size_t>(strip_columns(), 8);
    return (n + s - 1) / s * s;
}

// Scratch of a backward task. Matrices [C, C] are stored at [j, i], i the later token, with zeros where i < j.
template <class Operand>
struct BackwardScratch {
    using Element = typename Operand::Element;
    static constexpr std::size_t C = kBackwardChunk, kDepth = Operand::kDepth;

    ChunkGates gates;
    // The key head's, read once and used by every value head and both passes.
    float *k, *q;         // [tokens, K] normalised, q with scale
    Element* turned;      // [chunks, K/depth, C] keys, operand of reductions over K
    Element* k_by_token;  // [tokens/depth, K] keys, operand of reductions over tokens; k itself for floats
    float* grams;         // [chunks, 2, C, C] k_j . k_i and k_j . q_i
    float *d_q, *d_k;     // sums over the group: of all tokens where heads come in several rounds, else of a chunk
    // The value heads' of a round, from the first pass to the second.
    float* states;                  // [heads, chunks, V, K] in strips: state entering each chunk
    float* values;                  // [heads, tokens, V]
    float *deltas, *decayed_reads;  // [heads, tokens, V] X and e U. NOTE: e U is kept, not V - e U: under strong decay
                                    // the difference could not be undone
    float* adjoints;                // [heads, V, K] in strips: D
    Element *by_key, *by_value;     // [heads, V, K/depth], [heads, V/depth, K] in strips, of the state in the first
                                    // pass, D in the second
    // One chunk's of one value head.
    Element* d_u_residual;    // [C/depth, V] blocked by token
    Element* state_by_value;  // [V/depth, strip] of the entering state, in the second pass
    Blocked<Operand> k_blocked, x, d_o, d_u;
    Blocked<FloatDot> x_floats;    // the same memory as x for floats
    Blocked<FloatDot> k_floats;    // for the Gram matrices, with its turned rows
    float *k_turned, *q_turned;    // [K, C] the keys for pairs only: of floats they are in `turned`
    Element* q_by_token;           // [C/depth, K] e q
    float* both_turned;            // [V, 2C] W' | dO
    float *lower, *upper, *gamma;  // [C, C] L, P, Gamma
    float *d_lower, *d_upper;      // [C, C] <X_j, W'_i>, <X_j, dO_i>
    float *weight, *z, *gain;      // [C, C] Gamma P', Z, and what both give to gamma
    float *d_o_rows, *w;           // [C, V]
    float* read_turned;            // [band, C] K S or K D, transposed
    float* sums;                   // [C, 3, lanes] partial <X, r (K D)>, <W', e U>, <W', R> of each token
    float *u_factor, *q_factor;    // [C] -beta e and e, divided like D
    double* d_gamma;               // [C] NOTE: double, so that what enters at one token and leaves at another
                                   // cancels in the running sum
    float* d_beta;                 // [C]
    float* row;                    // [max(K, V)]
    float* tile;                   // [K, strip]
    float* turn;                   // [strip, K]

    template <class Booker>
    void book(Booker& b, std::size_t kc, std::size_t vc, std::size_t tokens, std::size_t group) {
        const std::size_t chunks = (tokens + C - 1) / C, padded = chunks * C;
        const std::size_t heads = heads_at_once(tokens, group);
        for (float** p :
             {&gates.high, &gates.low, &gates.decay, &gates.rest, &gates.beta, &d_beta, &u_factor, &q_factor})
            b.take(*p, C);
        b.take(d_gamma, C);
        for (float** p : {&k, &q}) b.take(*p, padded * kc);
        for (float** p : {&d_q, &d_k}) b.take(*p, (group > heads ? padded : C) * kc);
        b.take(turned, padded * kc / kDepth);
        b.take(grams, chunks * 2 * C * C);
        b.take(states, heads * chunks * kc * vc);
        for (float** p : {&values, &deltas, &decayed_reads}) b.take(*p, heads * padded * vc);
        b.take(adjoints, heads * kc * vc);
        if constexpr (kDepth == 1) {
            k_by_token = k;
            by_key = by_value = adjoints;
            state_by_value = nullptr;
        } else {
            b.take(k_by_token, padded * kc / kDepth);
            for (Element** p : {&by_key, &by_value}) b.take(*p, heads * kc * vc / kDepth);
            b.take(state_by_value, strip_columns() * vc / kDepth);
        }
        if constexpr (kDepth == 2)
            k_blocked.book(b, kc), b.take(k_turned, C * kc), b.take(d_u_residual, C * vc / kDepth);
        x.book(b, vc), d_o.book(b, vc), d_u.book(b, vc);
        if constexpr (kDepth == 2)
            x_floats.book(b, vc);
        else
            x_floats = x;
        k_floats.book(b, kc);
        b.take(q_turned, C * kc);
        b.take(q_by_token, C * kc / kDepth);
        b.take(both_turned, 2 * C * vc);
        for (float** p : {&lower, &upper, &gamma, &d_lower, &d_upper, &weight, &z, &gain}) b.take(*p, C * C);
        for (float** p : {&d_o_rows, &w}) b.take(*p, C * vc);
        b.take(read_turned, whole_strips(1) * C), b.take(sums, 3 * C * lanes());
        b.take(row, std::max(kc, vc)), b.take(tile, kc * strip_columns());
        b.take(turn, strip_columns() * (kc + kTileRows));
    }
};

}  // namespace HWY_NAMESPACE
}  // namespace flashqla::cpu
FQLA_END_TARGET

#endif  // toggled guard
