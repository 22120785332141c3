// The chunked backward pass of one value head of one task. Compiled per target.
//
// Pass one runs the state recurrence forward and keeps, for every chunk, the entering state S, the deltas X and the
// decayed reads e U = V - R. Pass two walks the chunks backwards with the adjoint D of the state that leaves the chunk.
// Both states are kept transposed, [V, K]: most products reduce over V, and the two that do not give a [V, C] result
// instead. With the symbols of forward-inl.hpp, K^ and Q^ including norms and scale (derivation: docs/math.md,
// "Gradients"):
//   X'  = P^T dO + r (K^ D)                r_i = exp(gamma_C - gamma_i)
//   W'  solves (I + L)^T W' = X'           the gradient of W = beta R
//   dV  = beta W'                          U' = -beta e W'
//   dQ^ = e (dO S^T) + (Gamma P') K^       P' = tril(dO X^T)
//   dK^ = U' S^T + r (X D^T) + (Gamma P')^T Q^ + (Z + Z^T) K^,   Z = -stril(W' X^T) beta Gamma
//   dbeta_i = <W'_i, R_i> + sum_j Z_ij (K^ K^^T)_ij / beta_i
//   D   <- exp(gamma_C) D + K^^T U' + Q^^T (e dO)
// and the gradient of gamma collects every place where a decay enters; differences of row and column sums leave out the
// diagonal, where both are the same number.

// NOTE: the guard toggles, see simd-inl.hpp.
#if defined(FQLA_CPU_BACKWARD_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FQLA_CPU_BACKWARD_INL_HPP_
#undef FQLA_CPU_BACKWARD_INL_HPP_
#else
#define FQLA_CPU_BACKWARD_INL_HPP_
#endif

#include <algorithm>
#include <cmath>

#include "base/workspace.hpp"
#include "cpu/chunk-inl.hpp"
#include "cpu/gates-inl.hpp"
#include "cpu/kernels.hpp"
#include "cpu/simd-inl.hpp"
#include "cpu/states-inl.hpp"
#include "cpu/tile-inl.hpp"

FQLA_BEGIN_TARGET
namespace flashqla::cpu {
namespace HWY_NAMESPACE {

// Tokens of a backward chunk: each chunk keeps a state in memory, so it is longer than the forward one.
inline constexpr std::size_t kBackwardChunk = 32;

// C[m,n] = (add ? C : 0) + sum_r A(i,r) B[r,n] in memory. A is blocked with rows = tokens (tile-inl.hpp).
template <bool kAdd>
HWY_NOINLINE void product_over_k(std::size_t m, std::size_t n, std::size_t blocks, const float* a, const float* b,
                                 std::size_t ldb, float* c, std::size_t ldc) {
    using Dot = FloatDot;
    const FloatTag d;
    const std::size_t l = lanes();
    for (std::size_t j = 0; j < n; j += 2 * l)
        for (std::size_t i = 0; i < m; i += kTileRows) {
            float* to = c + i * ldc + j;
            FQLA_TILE_ZERO()
            if constexpr (kAdd) {
#define FQLA_ROW(r)                   \
    x##r = hn::Load(d, to + r * ldc); \
    y##r = hn::Load(d, to + r * ldc + l);
                FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
            }
            FQLA_TILE_OVER_K(blocks, a + i * kTileRows, kBackwardChunk, b + j, ldb, l)
#define FQLA_ROW(r)                   \
    hn::Store(x##r, d, to + r * ldc); \
    hn::Store(y##r, d, to + r * ldc + l);
            FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
        }
}

// C[m,n] = sum_{r < depth} A(i,r) B[r,n] for a row-major A.
HWY_NOINLINE void product_of_rows(std::size_t m, std::size_t n, std::size_t depth, const float* a, std::size_t lda,
                                  const float* b, std::size_t ldb, float* c, std::size_t ldc) {
    using Dot = FloatDot;
    const FloatTag d;
    const std::size_t l = lanes(), kRowStep = lda;
    for (std::size_t j = 0; j < n; j += 2 * l)
        for (std::size_t i = 0; i < m; i += kTileRows) {
            FQLA_TILE_ZERO()
            for (std::size_t r = 0; r < depth; ++r) FQLA_TILE_STEP(a + i * lda + r, b + r * ldb + j, l)
            float* to = c + i * ldc + j;
#define FQLA_ROW(r)                   \
    hn::Store(x##r, d, to + r * ldc); \
    hn::Store(y##r, d, to + r * ldc + l);
            FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
        }
}

// Which part of a triangular A(i,r) is not zero, by tiles of rows.
enum class Part { all, until_row, from_row };

// C[m,n] = factor F + sum_{r < depth} A(i,r) B[r,n]; A(i,r) at a + i + r * lda. F may be C.
template <Part kPart>
HWY_NOINLINE void product_over_tokens(std::size_t m, std::size_t n, std::size_t depth, const float* a, std::size_t lda,
                                      const float* b, std::size_t ldb, float factor, const float* f, float* c,
                                      std::size_t ldc) {
    using Dot = FloatDot;
    const FloatTag d;
    const std::size_t l = lanes();
    constexpr std::size_t kRowStep = 1;
    for (std::size_t j = 0; j < n; j += 2 * l)
        for (std::size_t i = 0; i < m; i += kTileRows) {
            const std::size_t begin = kPart == Part::from_row ? i : 0;
            const std::size_t end = kPart == Part::until_row ? std::min(depth, i + kTileRows) : depth;
            const float* from = f + i * ldc + j;
            float* to = c + i * ldc + j;
            const auto scale = hn::Set(d, factor);
#define FQLA_ROW(r)                                          \
    auto x##r = hn::Mul(scale, hn::Load(d, from + r * ldc)); \
    auto y##r = hn::Mul(scale, hn::Load(d, from + r * ldc + l));
            FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
            for (std::size_t r = begin; r < end; ++r) FQLA_TILE_STEP(a + i + r * lda, b + r * ldb + j, l)
#define FQLA_ROW(r)                   \
    hn::Store(x##r, d, to + r * ldc); \
    hn::Store(y##r, d, to + r * ldc + l);
            FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
        }
}

// to[V,K] = factor from[V,K] + X^T Y for blocked X [C,V] and row-major Y [C,K].
HWY_INLINE void update_state(std::size_t vc, std::size_t kc, std::size_t tokens, const float* x_blocked, const float* y,
                             float factor, const float* from, float* to) {
    for (std::size_t v = 0; v < vc; v += kTileRows)
        product_over_tokens<Part::all>(kTileRows, kc, tokens, x_blocked + v / kTileRows * (kBackwardChunk * kTileRows),
                                       kTileRows, y, kc, factor, from + v * kc, to + v * kc, kc);
}

struct BackwardScratch {
    static constexpr std::size_t C = kBackwardChunk;

    ChunkGates gates;
    float *k, *q;                   // [tokens, K] normalised, q with scale: read once, used by every head and pass
    float* turned;                  // [chunks, K, C] the keys again
    float *k_blocked, *q_turned;    // [C, K] and [K, C] of one chunk, for its Gram matrices
    float* grams;                   // [chunks, 2, C, C] k_j . k_i and k_j . q_i at [j, i]
    float* lower;                   // [C, C] L at [j, i]
    float* upper_rows;              // [C, C] P at [i, j]
    float* decay_ij;                // [C, C] Gamma at [i, j]
    float *d_lower, *d_upper;       // [C, C] W' X^T and dO X^T at [i, j]
    float* sum_k;                   // [C, C] Z + Z^T
    float *weight, *weight_turned;  // [C, C] Gamma P' at [i, j] and at [j, i]
    float *d_o, *d_x, *d_u, *x;     // [C, V] row-major
    float *d_o_blocked, *d_x_blocked, *d_u_blocked, *x_blocked;  // [C, V]
    float* x_turned;                                             // [V, C]
    float* through_state;                                        // [C, K] e (dO S^T), then U' S^T, then r X D^T
    double* d_gamma;                // [C] NOTE: double, so that what enters at one token and leaves at another
                                    // cancels in the running sum
    float* d_beta;                  // [C]
    float* read_turned;             // [V, C] K S or K D, transposed
    float* d_state;                 // [V, K]
    float* tile;                    // [K, strip]
    float* turn;                    // [strip, K]
    float* states;                  // [chunks + 1, V, K] state entering each chunk
    float* values;                  // [tokens, V]
    float *deltas, *decayed_reads;  // [tokens, V] X and e U. NOTE: e U is kept, not V - e U: under strong decay
                                    // the difference could not be undone
    float *d_q, *d_k;               // [tokens, K] sums over the group

    template <class Booker>
    void book(Booker& b, std::size_t kc, std::size_t vc, std::size_t tokens) {
        const std::size_t chunks = (tokens + C - 1) / C, padded = chunks * C;
        for (float** p : {&gates.high, &gates.low, &gates.decay, &gates.rest, &gates.beta, &d_beta}) b.take(*p, C);
        b.take(d_gamma, C);
        for (float** p : {&k, &q, &turned}) b.take(*p, padded * kc);
        for (float** p : {&k_blocked, &q_turned, &through_state}) b.take(*p, C * kc);
        for (float** p : {&lower, &upper_rows, &decay_ij, &d_lower, &d_upper, &sum_k, &weight, &weight_turned})
            b.take(*p, C * C);
        for (float** p : {&d_o, &d_x, &d_u, &x, &d_o_blocked, &d_x_blocked, &d_u_blocked, &x_blocked, &x_turned})
            b.take(*p, C * vc);
        b.take(grams, chunks * 2 * C * C);
        b.take(read_turned, vc * C);
        b.take(d_state, kc * vc);
        b.take(tile, kc * strip_columns());
        b.take(turn, strip_columns() * (kc + kTileRows));
        b.take(states, (chunks + 1) * kc * vc);
        for (float** p : {&values, &deltas, &decayed_reads}) b.take(*p, padded * vc);
        b.take(d_q, padded * kc), b.take(d_k, padded * kc);
    }
};

HWY_INLINE std::size_t whole_strips(std::size_t n) {
    const std::size_t s = std::max<std::size_t>(strip_columns(), 8);
    return (n + s - 1) / s * s;
}

struct BackwardRun {
    static constexpr std::size_t C = kBackwardChunk;
    const BackwardTask& task;
    const BackwardCall& call;
    std::size_t dim_k, dim_v, kc, vc;  // sizes, and padded to whole strips
    BackwardScratch s;
    // The chunk at hand.
    std::int64_t first = 0;
    std::size_t n = 0, rows = 0;  // tokens, and padded to whole tiles
    std::int32_t head = 0;
    float *gram_k = nullptr, *gram_q = nullptr;  // [C, C]
    float *k = nullptr, *q = nullptr;            // [C, K]
    float* turned = nullptr;                     // [K, C]
    float* values = nullptr;                     // [C, V]

    BackwardRun(const BackwardTask& t, std::byte* scratch)
        : task(t),
          call(*t.call),
          dim_k(static_cast<std::size_t>(t.shape.dim_k)),
          dim_v(static_cast<std::size_t>(t.shape.dim_v)),
          kc(whole_strips(dim_k)),
          vc(whole_strips(dim_v)) {
        Taker taker{scratch};
        s.book(taker, kc, vc, static_cast<std::size_t>(t.scratch_tokens));
    }

    std::int64_t at(const TokenRef& x, std::size_t i, std::int32_t h) const {
        return x.offset(task.span.batch, task.span.begin + first + std::int64_t(i), h);
    }

    // Row-major [C, n] to blocked.
    static HWY_INLINE void block(const float* from, std::size_t columns, std::size_t tokens, float* to) {
        for (std::size_t k = 0; k < columns; k += kTileRows)
            for (std::size_t t = 0; t < tokens; ++t)
                std::memcpy(to + k * C + t * kTileRows, from + t * columns + k, kTileRows * sizeof(float));
    }

    static HWY_INLINE float dot(const float* a, const float* b, std::size_t count) {
        const FloatTag d;
        auto sum = hn::Zero(d);
        for (std::size_t i = 0; i < count; i += lanes()) sum = hn::MulAdd(hn::Load(d, a + i), hn::Load(d, b + i), sum);
        return hn::GetLane(hn::SumOfLanes(d, sum));
    }

    // <a, b - c>
    static HWY_INLINE float dot_difference(const float* a, const float* b, const float* c, std::size_t count) {
        const FloatTag d;
        auto sum = hn::Zero(d);
        for (std::size_t i = 0; i < count; i += lanes())
            sum = hn::MulAdd(hn::Load(d, a + i), hn::Sub(hn::Load(d, b + i), hn::Load(d, c + i)), sum);
        return hn::GetLane(hn::SumOfLanes(d, sum));
    }

    static HWY_INLINE void scaled(const float* from, float factor, std::size_t count, float* to) {
        const FloatTag d;
        const auto f = hn::Set(d, factor);
        for (std::size_t i = 0; i < count; i += lanes()) hn::Store(hn::Mul(f, hn::Load(d, from + i)), d, to + i);
    }

    // Rows of a token tensor, zeros past the chunk and past `columns`; zeros throughout when it is not given.
    HWY_INLINE void load_rows(const TokenRef& x, std::int32_t h, std::size_t dim, std::size_t columns,
                              float* to) const {
        for (std::size_t i = 0; i < rows; ++i) {
            float* row = to + i * columns;
            const std::size_t used = x && i < n ? dim : 0;
            if (used) load_row(x.data, x.dtype, at(x, i, h), dim, row);
            for (std::size_t j = used; j < columns; ++j) row[j] = 0.0f;
        }
    }

    HWY_INLINE void normalise(float* x, float factor) const {
        for (std::size_t i = 0; i < rows; ++i) {
            const float norm = factor * inverse_norm(call, x + i * kc, dim_k);
            if (norm != 1.0f) scale_row(x + i * kc, kc, norm);
        }
    }

    HWY_INLINE void enter_chunk(std::int64_t begin) {
        first = begin;
        n = static_cast<std::size_t>(std::min<std::int64_t>(std::int64_t(C), task.span.length - begin));
        rows = (n + kTileRows - 1) / kTileRows * kTileRows;
        const auto token = static_cast<std::size_t>(begin), chunk = token / C;
        k = s.k + token * kc;
        q = s.q + token * kc;
        turned = s.turned + chunk * kc * C;
        values = s.values + token * vc;
        gram_k = s.grams + chunk * (2 * C * C);
        gram_q = gram_k + C * C;
        s.gates.fill(call, task.span, first, n, rows, head);
    }

    // Keys, queries and their Gram matrices of the chunk; every value head of the group reads them in both passes.
    HWY_INLINE void load_keys() {
        load_rows(call.k, task.key_head, dim_k, kc, k);
        load_rows(call.q, task.key_head, dim_k, kc, q);
        normalise(k, 1.0f);
        normalise(q, call.problem.scale);
        block(k, kc, rows, s.k_blocked);
        transpose(k, kc, rows, kc, turned, C);
        transpose(q, kc, rows, kc, s.q_turned, C);
        const auto to_queries = static_cast<std::size_t>(s.q_turned - turned);  // q_turned is booked later
        using Dot = FloatDot;
        const FloatTag d;
        for (std::size_t j = 0; j < rows; j += kTileRows)
            for (std::size_t i = j / lanes() * lanes(); i < rows; i += lanes()) {
                FQLA_TILE_ZERO()
                FQLA_TILE_OVER_K(kc / kTileRows, s.k_blocked + j * kTileRows, C, turned + i, C, to_queries)
#define FQLA_ROW(r)                                \
    hn::StoreU(x##r, d, gram_k + (j + r) * C + i); \
    hn::StoreU(y##r, d, gram_q + (j + r) * C + i);
                FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
            }
    }

    // lower[j,i] = L_ij for i > j, else 0.
    HWY_INLINE void fill_lower() {
        const FloatTag d;
        for (std::size_t j = 0; j < rows; ++j) {
            for (std::size_t i = 0; i < j / lanes() * lanes(); ++i) s.lower[j * C + i] = 0.0f;
            for (std::size_t i = j / lanes() * lanes(); i < rows; i += lanes()) {
                const auto below = hn::Gt(hn::Iota(d, static_cast<float>(i)), hn::Set(d, static_cast<float>(j)));
                const auto x = hn::Mul(hn::Mul(s.gates.between(i, j), hn::Load(d, s.gates.beta + i)),
                                       hn::Load(d, gram_k + j * C + i));
                hn::Store(hn::IfThenElseZero(below, x), d, s.lower + j * C + i);
            }
        }
    }

    // One row of a substitution: row i of x minus the sum over j in [begin, end) of factor(j) x_j.
    template <class Factor>
    HWY_INLINE void substitute_row(float* x, std::size_t i, std::size_t begin, std::size_t end, Factor&& factor) const {
        const FloatTag d;
        const std::size_t l = lanes();
        float* row = x + i * vc;
        std::size_t v = 0;
        for (; v + kTileRows * l <= vc; v += kTileRows * l) {
#define FQLA_ROW(r) auto x##r = hn::Load(d, row + v + r * l);
            FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
            for (std::size_t j = begin; j < end; ++j) {
                const auto f = hn::Set(d, factor(j));
                const float* other = x + j * vc + v;
#define FQLA_ROW(r) x##r = hn::NegMulAdd(f, hn::Load(d, other + r * l), x##r);
                FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
            }
#define FQLA_ROW(r) hn::Store(x##r, d, row + v + r * l);
            FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
        }
        for (; v < vc; v += l) {
            auto sum = hn::Load(d, row + v);
            for (std::size_t j = begin; j < end; ++j)
                sum = hn::NegMulAdd(hn::Set(d, factor(j)), hn::Load(d, x + j * vc + v), sum);
            hn::Store(sum, d, row + v);
        }
    }

    // X solves (I + L) X = W in place.
    HWY_NOINLINE void substitute(float* x) const {
        for (std::size_t i = 1; i < n; ++i)
            substitute_row(x, i, 0, i, [&](std::size_t j) { return s.lower[j * C + i]; });
    }

    // W' solves (I + L)^T W' = X' in place, from the last row up.
    HWY_NOINLINE void substitute_back(float* w) const {
        for (std::size_t j = n - 1; j-- > 0;)
            substitute_row(w, j, j + 1, n, [&](std::size_t i) { return s.lower[j * C + i]; });
    }

    // [Hv,K,V] floats as a state tensor of one row.
    HWY_INLINE StateRef carry_ref(const float* data) const {
        return {const_cast<float*>(data), DType::f32, 1, 0, std::int64_t(dim_k * dim_v), std::int64_t(dim_v), 1, 0};
    }

    // A [K,V] state as [V,K]; zeros when it is not given.
    HWY_INLINE void load_turned(const StateRef& from, std::int64_t row, float* to) const {
        const std::size_t strip = strip_columns();
        for (std::size_t v0 = 0; v0 < vc; v0 += strip) {
            if (!from || v0 >= dim_v) {
                fill(to + v0 * kc, strip * kc, 0.0f);
                continue;
            }
            load_tile(from, row, head, v0, std::min(strip, dim_v - v0), {s.tile, strip, dim_k, kc}, s.turn);
            transpose(s.tile, strip, kc, strip, to + v0 * kc, kc);
        }
    }

    HWY_INLINE void store_turned(const float* from, const StateRef& to, std::int64_t row) const {
        const std::size_t strip = strip_columns();
        for (std::size_t v0 = 0; v0 < dim_v; v0 += strip) {
            transpose(from + v0 * kc, kc, strip, kc, s.tile, strip);
            store_tile({s.tile, strip, dim_k, kc}, v0, std::min(strip, dim_v - v0), to, row, head, s.turn);
        }
    }

    // Pass one over one value head.
    HWY_INLINE void recompute(bool first_of_group) {
        const FloatTag d;
        if (task.first)
            load_turned(call.initial_state, task.sequence, s.states);
        else
            load_turned(carry_ref(task.carry_in), 0, s.states);
        for (std::int64_t t = 0; t < task.span.length; t += std::int64_t(C)) {
            enter_chunk(t);
            if (first_of_group) load_keys();
            fill_lower();
            const float* state = s.states + std::size_t(t) / C * kc * vc;
            float* x = s.deltas + std::size_t(t) * vc;
            float* read = s.decayed_reads + std::size_t(t) * vc;
            load_rows(call.v, head, dim_v, vc, values);
            product_of_rows(vc, rows, kc, state, kc, turned, C, s.read_turned, C);  // (K S)^T
            transpose(s.read_turned, C, vc, rows, x, vc);
            for (std::size_t i = 0; i < rows; ++i) {
                const auto e = hn::Set(d, s.gates.decay[i]), beta = hn::Set(d, s.gates.beta[i]);
                for (std::size_t v = 0; v < vc; v += lanes()) {
                    const auto eu = hn::Mul(e, hn::Load(d, x + i * vc + v));
                    hn::Store(eu, d, read + i * vc + v);
                    hn::Store(hn::Mul(beta, hn::Sub(hn::Load(d, values + i * vc + v), eu)), d, x + i * vc + v);
                }
            }
            substitute(x);
            for (std::size_t i = 0; i < rows; ++i) scaled(x + i * vc, s.gates.rest[i], vc, s.x + i * vc);
            block(s.x, vc, rows, s.x_blocked);
            update_state(vc, kc, rows, s.x_blocked, k, s.gates.total, state, const_cast<float*>(state) + kc * vc);
        }
    }

    // Small matrices of pass two.
    HWY_INLINE void fill_matrices() {
        fill_lower();
        const FloatTag d;
        for (std::size_t j = 0; j < rows; ++j) {
            for (std::size_t i = 0; i < j / lanes() * lanes(); ++i) s.weight_turned[j * C + i] = s.sum_k[j * C + i] = 0;
            for (std::size_t i = j / lanes() * lanes(); i < rows; i += lanes()) {
                const auto gamma = s.gates.between(i, j);
                hn::Store(gamma, d, s.sum_k + j * C + i);
                hn::Store(hn::Mul(gamma, hn::Load(d, gram_q + j * C + i)), d, s.weight_turned + j * C + i);
            }
        }
        transpose(s.weight_turned, C, C, C, s.upper_rows, C);
        transpose(s.sum_k, C, C, C, s.decay_ij, C);
    }

    // One chunk of pass two.
    HWY_INLINE void chunk_back(std::int64_t t) {
        enter_chunk(t);
        fill_matrices();
        const ChunkGates& g = s.gates;
        const float* x = s.deltas + std::size_t(t) * vc;
        const float* read = s.decayed_reads + std::size_t(t) * vc;
        const float* state = s.states + std::size_t(t) / C * kc * vc;  // [V, K]
        load_rows(call.d_o, head, dim_v, vc, s.d_o);

        // X' = r (K D) + P^T dO; <r X, K D> is where the decay to the chunk's end enters gamma. The last token's own
        // would be subtracted from itself.
        product_of_rows(vc, rows, kc, s.d_state, kc, turned, C, s.read_turned, C);  // (K D)^T
        transpose(s.read_turned, C, vc, rows, s.d_x, vc);
        double to_end = 0.0;
        for (std::size_t i = 0; i < rows; ++i) {
            scale_row(s.d_x + i * vc, vc, g.rest[i]);
            const float part = i + 1 < n ? dot(x + i * vc, s.d_x + i * vc, vc) : 0.0f;
            s.d_gamma[i] = -part;
            to_end += part;
        }
        product_over_tokens<Part::from_row>(rows, vc, rows, s.upper_rows, C, s.d_o, vc, 1.0f, s.d_x, s.d_x, vc);
        substitute_back(s.d_x);

        block(s.d_o, vc, rows, s.d_o_blocked);
        if (!task.adjoint_out) {
            block(s.d_x, vc, rows, s.d_x_blocked);
            transpose(x, vc, rows, vc, s.x_turned, C);
            small_products();
        }
        for (std::size_t i = 0; i < rows; ++i) {
            const float* w = s.d_x + i * vc;
            scaled(w, -g.beta[i] * g.decay[i], vc, s.d_u + i * vc);
            if (task.adjoint_out) continue;
            const float with_read = dot(w, read + i * vc, vc);
            s.d_beta[i] += dot_difference(w, values + i * vc, read + i * vc, vc);  // <W', R>
            s.d_gamma[i] -= double(g.beta[i]) * with_read;                         // <U', U>
            if (call.d_v && i < n) {
                scaled(w, g.beta[i], vc, values + i * vc);
                store_row(values + i * vc, dim_v, call.d_v.data, call.d_v.dtype, at(call.d_v, i, head));
            }
        }
        block(s.d_u, vc, rows, s.d_u_blocked);

        if (!task.adjoint_out) token_gradients(t, x, state, to_end);

        // D <- exp(gamma_C) D + K^T U' + Q^T (e dO)
        update_state(vc, kc, rows, s.d_u_blocked, k, g.total, s.d_state, s.d_state);
        for (std::size_t i = 0; i < rows; ++i) scaled(q + i * kc, g.decay[i], kc, s.through_state + i * kc);
        update_state(vc, kc, rows, s.d_o_blocked, s.through_state, 1.0f, s.d_state, s.d_state);
    }

    // Gradients of the chunk's queries, keys and gates.
    HWY_INLINE void token_gradients(std::int64_t t, const float* x, const float* state, double to_end) {
        const ChunkGates& g = s.gates;
        // Queries: e (dO S^T) + (Gamma P') K.
        float* d_q = s.d_q + std::size_t(t) * kc;
        float* d_k = s.d_k + std::size_t(t) * kc;
        product_over_k<false>(rows, kc, vc / kTileRows, s.d_o_blocked, state, kc, s.through_state, kc);
        for (std::size_t i = 0; i < rows; ++i) {
            scale_row(s.through_state + i * kc, kc, g.decay[i]);
            s.d_gamma[i] += dot(q + i * kc, s.through_state + i * kc, kc);
            accumulate(s.through_state + i * kc, kc, d_q + i * kc);
        }
        product_over_tokens<Part::until_row>(rows, kc, rows, s.weight_turned, C, k, kc, 1.0f, d_q, d_q, kc);

        // Keys: U' S^T + (r X) D^T + (Gamma P')^T Q + (Z + Z^T) K.
        for (std::size_t i = 0; i < rows; ++i) scaled(x + i * vc, g.rest[i], vc, s.x + i * vc);
        block(s.x, vc, rows, s.x_blocked);
        product_over_k<true>(rows, kc, vc / kTileRows, s.d_u_blocked, state, kc, d_k, kc);
        product_over_k<true>(rows, kc, vc / kTileRows, s.x_blocked, s.d_state, kc, d_k, kc);
        product_over_tokens<Part::from_row>(rows, kc, rows, s.weight, C, q, kc, 1.0f, d_k, d_k, kc);
        product_over_tokens<Part::all>(rows, kc, rows, s.sum_k, C, k, kc, 1.0f, d_k, d_k, kc);

        // The chunk's whole decay: <D, S> and the ends of all r.
        s.d_gamma[n - 1] += to_end + g.total * dot_states(state);
        for (std::size_t i = n; i < rows; ++i) s.d_gamma[n - 1] += s.d_gamma[i];
        store_gates();
    }

    static HWY_INLINE void accumulate(const float* from, std::size_t count, float* to) {
        const FloatTag d;
        for (std::size_t i = 0; i < count; i += lanes())
            hn::Store(hn::Add(hn::Load(d, from + i), hn::Load(d, to + i)), d, to + i);
    }

    // <D, S>, row sums in double: it is the longest sum of the pass.
    HWY_INLINE double dot_states(const float* state_turned) const {
        double sum = 0.0;
        for (std::size_t v = 0; v < vc; ++v) sum += dot(state_turned + v * kc, s.d_state + v * kc, kc);
        return sum;
    }

    // P', Z, their products with Gamma, and what they give to beta and gamma.
    HWY_INLINE void small_products() {
        product_over_k<false>(rows, C, vc / kTileRows, s.d_x_blocked, s.x_turned, C, s.d_lower, C);
        product_over_k<false>(rows, C, vc / kTileRows, s.d_o_blocked, s.x_turned, C, s.d_upper, C);
        fill(s.sum_k, C * C, 0.0f);
        fill(s.weight, C * C, 0.0f);
        for (std::size_t i = 0; i < rows; ++i) s.d_beta[i] = 0.0f;
        for (std::size_t i = 0; i < n; ++i) {
            const float beta = s.gates.beta[i];
            for (std::size_t j = 0; j <= i; ++j) {
                const float gamma = s.decay_ij[i * C + j];
                const float p = gamma * s.d_upper[i * C + j];  // Gamma P'
                s.weight[i * C + j] = p;
                if (j == i) continue;
                const float l = -gamma * s.d_lower[i * C + j];  // Gamma L'
                const float kk = gram_k[j * C + i];
                const float z = beta * l;
                s.sum_k[i * C + j] = s.sum_k[j * C + i] = z;
                s.d_beta[i] += l * kk;
                const double gain = double(p) * gram_q[j * C + i] + double(z) * kk;
                s.d_gamma[i] += gain;
                s.d_gamma[j] -= gain;
            }
        }
        transpose(s.weight, C, C, C, s.weight_turned, C);
    }

    // Gradients of g and beta of the chunk, through softplus and sigmoid; partial sums of A_log and dt_bias.
    HWY_INLINE void store_gates() {
        const Problem& p = call.problem;
        double suffix = 0.0, d_A_log = 0.0, d_bias = 0.0;
        double bias = 0.0, rate = 1.0;
        if (p.gate == Gate::raw) {
            if (call.dt_bias) bias = load_float(call.dt_bias.data, call.dt_bias.dtype, head * call.dt_bias.stride);
            rate = std::exp(double(load_float(call.A_log.data, call.A_log.dtype, head * call.A_log.stride)));
        }
        for (std::size_t i = n; i-- > 0;) {
            suffix += s.d_gamma[i];
            double d_g = suffix;
            const double g = log_decay(call, task.span, first + std::int64_t(i), head);
            if (p.gate != Gate::none && std::exp(static_cast<float>(g)) == 0.0f) d_g = 0.0;
            if (p.gate == Gate::raw) {
                const double raw = bias + load_float(call.g.data, call.g.dtype, at(call.g, i, head));
                d_A_log += d_g == 0.0 ? 0.0 : d_g * g;
                d_g *= -rate * sigmoid(raw);
                d_bias += d_g;
            }
            if (call.d_g) store_float(call.d_g.data, call.d_g.dtype, at(call.d_g, i, head), static_cast<float>(d_g));
            if (call.d_beta) {
                double d_b = double(p.beta_factor) * s.d_beta[i];
                if (p.beta_mode == BetaMode::logit && call.beta) {
                    const double sig = sigmoid(load_float(call.beta.data, call.beta.dtype, at(call.beta, i, head)));
                    d_b *= sig * (1.0 - sig);
                }
                store_float(call.d_beta.data, call.d_beta.dtype, at(call.d_beta, i, head), static_cast<float>(d_b));
            }
        }
        if (task.d_A_log) task.d_A_log[head] += d_A_log, task.d_dt_bias[head] += d_bias;
    }

    // Through the norms: d x = n (d x^ - x^ <x^, d x^>), x^ = n x; queries carry scale on top.
    HWY_INLINE void store_tokens(const TokenRef& x, const TokenRef& to, float factor, float* grad) {
        if (!to) return;
        for (std::int64_t t = 0; t < task.span.length; ++t) {
            float* row = grad + std::size_t(t) * kc;
            const std::int64_t b = task.span.batch, token = task.span.begin + t;
            if (call.problem.qk_l2norm) {
                load_row(x.data, x.dtype, x.offset(b, token, task.key_head), dim_k, s.through_state);
                for (std::size_t j = dim_k; j < kc; ++j) s.through_state[j] = 0.0f;
                const float norm = inverse_norm(call, s.through_state, dim_k);
                const float along = dot(s.through_state, row, kc) * norm * norm;
                for (std::size_t j = 0; j < dim_k; ++j) row[j] = factor * norm * (row[j] - along * s.through_state[j]);
            } else if (factor != 1.0f) {
                scale_row(row, kc, factor);
            }
            store_row(row, dim_k, to.data, to.dtype, to.offset(b, token, task.key_head));
        }
    }

    HWY_INLINE void run() {
        const std::size_t chunks = (static_cast<std::size_t>(task.span.length) + C - 1) / C;
        fill(s.d_q, chunks * C * kc, 0.0f);
        fill(s.d_k, chunks * C * kc, 0.0f);
        for (std::int32_t r = 0; r < task.shape.group; ++r) {
            head = call.value_head(task.key_head, r);
            recompute(r == 0);
            if (task.last)
                load_turned(call.d_final_state, task.sequence, s.d_state);
            else
                load_turned(carry_ref(task.adjoint_in), 0, s.d_state);
            for (std::size_t c = chunks; c-- > 0;) chunk_back(std::int64_t(c * C));
            if (task.adjoint_out)
                store_turned(s.d_state, carry_ref(task.adjoint_out), 0);
            else if (task.first && call.d_initial_state)
                store_turned(s.d_state, call.d_initial_state, task.sequence);
        }
        if (task.adjoint_out) return;
        store_tokens(call.q, call.d_q, call.problem.scale, s.d_q);
        store_tokens(call.k, call.d_k, 1.0f, s.d_k);
    }
};

void backward_task(const BackwardTask& task, std::byte* scratch) { BackwardRun(task, scratch).run(); }

std::size_t backward_scratch(const Shape& shape, std::int64_t tokens) {
    BackwardScratch s;
    Taker taker{nullptr};
    s.book(taker, whole_strips(static_cast<std::size_t>(shape.dim_k)),
           whole_strips(static_cast<std::size_t>(shape.dim_v)), static_cast<std::size_t>(tokens));
    return taker.bytes();
}

}  // namespace HWY_NAMESPACE
}  // namespace flashqla::cpu
FQLA_END_TARGET

#endif  // toggled guard
