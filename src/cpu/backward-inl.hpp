// The chunked backward pass of one value head of one task. Compiled per target.
//
// Pass one runs the state recurrence forward and keeps, for every chunk, the entering state S, the deltas X and the
// decayed reads e U = V - R. Pass two walks the chunks backwards with the adjoint D of the state that leaves the chunk.
// Both states are kept transposed, in strips of K: most products reduce over V, and the two that do not give a [V, C]
// result instead. With the symbols of forward-inl.hpp, K^ and Q^ including norms and scale (derivation: docs/math.md,
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

#include "cpu/backward_products-inl.hpp"
#include "cpu/backward_scratch-inl.hpp"
#include "cpu/chunk-inl.hpp"
#include "cpu/gates-inl.hpp"
#include "cpu/kernels.hpp"
#include "cpu/simd-inl.hpp"
#include "cpu/states-inl.hpp"
#include "cpu/tile-inl.hpp"

FQLA_BEGIN_TARGET
namespace flashqla::cpu {
namespace HWY_NAMESPACE {

template <class Operand>
struct BackwardRun {
    static constexpr std::size_t C = kBackwardChunk, kDepth = Operand::kDepth;
    using Element = typename Operand::Element;

    const BackwardTask& task;
    const BackwardCall& call;
    std::size_t dim_k, dim_v, kc, vc;  // sizes, and padded to whole strips
    std::size_t band;  // columns of V that go through the small steps together, in the first-level cache
    BackwardScratch<Operand> s;
    std::size_t group, most_heads, tokens, chunks;  // value heads, of a round; scratch of a head
    bool keeps_far = false;            // rows kept for the second pass are asked for ahead, as the caller's are
    float adjoint_scale = 1.0f;        // NOTE: pairs keep D divided by scale, so that q without scale is their operand:
                                       // exact where nothing decays
    std::size_t round = 0, heads = 0;  // first value head of the group at hand, and their number
    // The chunk and head at hand.
    std::int64_t first = 0;
    std::size_t n = 0, rows = 0;  // tokens, and padded to whole tiles
    std::int32_t head = 0;
    StateForms<Operand> adjoint, state;                                    // D / adjoint_scale, and S entering
    float *gram_k = nullptr, *gram_q = nullptr;                            // [C, C]
    float *k = nullptr, *q = nullptr, *d_k = nullptr, *d_q = nullptr;      // [C, K]
    Element *turned = nullptr, *k_by_token = nullptr;                      // [K/depth, C], [C/depth, K]
    float *values = nullptr, *deltas = nullptr, *decayed_reads = nullptr;  // [C, V]

    BackwardRun(const BackwardTask& t, std::byte* scratch)
        : task(t),
          call(*t.call),
          dim_k(static_cast<std::size_t>(t.shape.dim_k)),
          dim_v(static_cast<std::size_t>(t.shape.dim_v)),
          kc(whole_strips(dim_k)),
          vc(whole_strips(dim_v)),
          band(whole_strips(1)) {
        group = static_cast<std::size_t>(t.shape.group);
        keeps_far = is_long(static_cast<std::size_t>(t.scratch_tokens));
        most_heads = heads_at_once(static_cast<std::size_t>(t.scratch_tokens), group);
        chunks = (static_cast<std::size_t>(t.scratch_tokens) + C - 1) / C, tokens = chunks * C;
        Taker taker{scratch};
        s.book(taker, kc, vc, static_cast<std::size_t>(t.scratch_tokens), group);
        if (kDepth == 2) adjoint_scale = call.problem.scale;
    }

    std::int64_t at(const TokenRef& x, std::size_t i, std::int32_t h) const {
        return x.offset(task.span.batch, task.span.begin + first + std::int64_t(i), h);
    }

    static HWY_INLINE float dot(const float* a, const float* b, std::size_t count) {
        const FloatTag d;
        auto sum = hn::Zero(d);
        for (std::size_t i = 0; i < count; i += lanes()) sum = hn::MulAdd(hn::Load(d, a + i), hn::Load(d, b + i), sum);
        return hn::GetLane(hn::SumOfLanes(d, sum));
    }

    // The state that enters a chunk of the head in `slot` of the round.
    HWY_INLINE StateForms<Operand> entering(std::size_t chunk, std::size_t slot) const {
        float* sum = s.states + (slot * chunks + chunk) * (kc * vc);
        if constexpr (kDepth == 1)
            return {sum, sum, sum};
        else
            return {sum, s.by_key + slot * (kc * vc / kDepth), nullptr};  // by value only in the second pass
    }

    HWY_INLINE StateForms<Operand> adjoint_of(std::size_t slot) const {
        const std::size_t size = kc * vc;
        return {s.adjoints + slot * size, s.by_key + slot * size / kDepth, s.by_value + slot * size / kDepth};
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

    HWY_INLINE void enter_chunk(std::size_t chunk) {
        const std::size_t token = chunk * C;
        first = static_cast<std::int64_t>(token);
        n = static_cast<std::size_t>(std::min<std::int64_t>(std::int64_t(C), task.span.length - first));
        rows = (n + kTileRows - 1) / kTileRows * kTileRows;
        k = s.k + token * kc, q = s.q + token * kc;
        const std::size_t sums = group > most_heads ? token * kc : 0;
        d_k = s.d_k + sums, d_q = s.d_q + sums;
        turned = s.turned + token * kc / kDepth;
        k_by_token = s.k_by_token + token * kc / kDepth;
        gram_k = s.grams + chunk * (2 * C * C);
        gram_q = gram_k + C * C;
    }

    HWY_INLINE void enter_head(std::size_t slot) {
        head = call.value_head(task.key_head, static_cast<std::int32_t>(round + slot));
        state = entering(static_cast<std::size_t>(first) / C, slot);
        adjoint = adjoint_of(slot);
        const std::size_t at_token = (slot * tokens + static_cast<std::size_t>(first)) * vc;
        values = s.values + at_token, deltas = s.deltas + at_token, decayed_reads = s.decayed_reads + at_token;
        s.gates.fill(call, task.span, first, n, rows, head);
    }

    std::size_t used_chunks() const { return (static_cast<std::size_t>(task.span.length) + C - 1) / C; }

    // Keys, queries and their Gram matrices of the chunk; every value head of the group reads them in both passes.
    HWY_INLINE void load_keys() {
        load_rows(call.k, task.key_head, dim_k, kc, k);
        load_rows(call.q, task.key_head, dim_k, kc, q);
        normalise(k, 1.0f);
        normalise(q, call.problem.scale);
        transpose(q, kc, rows, kc, s.q_turned, C);
        s.k_floats.fill_by_channel(k, kc, nullptr, kc, rows);
        if constexpr (kDepth == 1) {
            s.k_floats.turn(kc, rows, turned, C);
            gram_matrices(turned);
        } else {
            s.k_floats.turn(kc, rows, s.k_turned, C);
            gram_matrices(s.k_turned);
            s.k_blocked.fill_by_channel(k, kc, nullptr, kc, rows);
            s.k_blocked.turn(kc, rows, turned, C);
            rows_by_token<Operand>(k, nullptr, kc, rows, k_by_token);
        }
    }

    // k_turned: [K, C]
    HWY_INLINE void gram_matrices(const float* k_turned) const {
        const auto to_queries = static_cast<std::size_t>(s.q_turned - k_turned);  // q_turned is booked later
        products_of_rows(kc, rows, s.k_floats.by_channel, k_turned, C, to_queries, gram_k, gram_q);
    }

    // L, and for the second pass Gamma and P.
    HWY_INLINE void fill_matrices(bool second_pass) {
        const FloatTag d;
        for (std::size_t j = 0; j < rows; ++j) {
            for (std::size_t i = 0; i < j / lanes() * lanes(); ++i) s.lower[j * C + i] = s.upper[j * C + i] = 0.0f;
            for (std::size_t i = j / lanes() * lanes(); i < rows; i += lanes()) {
                const std::size_t ji = j * C + i;
                const auto below = hn::Gt(hn::Iota(d, static_cast<float>(i)), hn::Set(d, static_cast<float>(j)));
                const auto gamma = s.gates.between(i, j);
                const auto l = hn::Mul(hn::Mul(gamma, hn::Load(d, s.gates.beta + i)), hn::Load(d, gram_k + ji));
                hn::Store(hn::IfThenElseZero(below, l), d, s.lower + ji);
                if (!second_pass) continue;
                hn::Store(gamma, d, s.gamma + ji);
                const auto inside = hn::Ge(hn::Iota(d, static_cast<float>(i)), hn::Set(d, static_cast<float>(j)));
                hn::Store(hn::IfThenElseZero(inside, hn::Mul(gamma, hn::Load(d, gram_q + ji))), d, s.upper + ji);
            }
        }
    }

    // [Hv,K,V] floats as a state tensor of one row.
    HWY_INLINE StateRef carry_ref(const float* data) const {
        return {const_cast<float*>(data), DType::f32, 1, 0, std::int64_t(dim_k * dim_v), std::int64_t(dim_v), 1, 0};
    }

    // A [K,V] state times `factor` in all forms; zeros when it is not given.
    HWY_INLINE void load_turned(const StateRef& from, std::int64_t row, float factor,
                                const StateForms<Operand>& to) const {
        const std::size_t strip = strip_columns();
        for (std::size_t v0 = 0; v0 < vc; v0 += strip) {
            if (!from || v0 >= dim_v) {
                for (std::size_t k0 = 0; k0 < kc; k0 += strip) fill(to.sum + k0 * vc + v0 * strip, strip * strip, 0.0f);
                continue;
            }
            load_tile(from, row, head, v0, std::min(strip, dim_v - v0), {s.tile, strip, dim_k, kc}, s.turn);
            for (std::size_t k0 = 0; k0 < kc; k0 += strip)
                transpose(s.tile + k0 * strip, strip, strip, strip, to.sum + k0 * vc + v0 * strip, strip);
        }
        if (factor != 1.0f) scale_row(to.sum, vc * kc, factor);
        to.refresh(vc, kc);
    }

    HWY_INLINE void store_adjoint(const StateRef& to, std::int64_t row) const {
        const std::size_t strip = strip_columns();
        if (adjoint_scale != 1.0f) scale_row(adjoint.sum, vc * kc, adjoint_scale);
        for (std::size_t v0 = 0; v0 < dim_v; v0 += strip) {
            for (std::size_t k0 = 0; k0 < kc; k0 += strip)
                transpose(adjoint.sum + k0 * vc + v0 * strip, strip, strip, strip, s.tile + k0 * strip, strip);
            store_tile({s.tile, strip, dim_k, kc}, v0, std::min(strip, dim_v - v0), to, row, head, s.turn);
        }
    }

    // Asks for what a pass reads (or writes) of tensor x after the head in `slot`: the next head of this chunk, or the
    // first head of chunk `next`.
    HWY_INLINE void ask_ahead(const TokenRef& x, std::size_t slot, std::size_t next, RowsAhead& ahead) const {
        const bool same_chunk = slot + 1 < heads;
        const std::int64_t begin = same_chunk ? first : static_cast<std::int64_t>(next * C);
        const std::int64_t end = std::min<std::int64_t>(begin + std::int64_t(C), task.span.length);
        ahead.add(x, task.span.batch, task.span.begin + begin, task.span.begin + end,
                  call.value_head(task.key_head, static_cast<std::int32_t>(round + (same_chunk ? slot + 1 : 0))), 0,
                  dim_v);
    }

    // X and e U of the chunk in the band of columns at v.
    HWY_INLINE void make_deltas(std::size_t v, RowsAhead& ahead) const {
        const FloatTag d;
        read_state<Operand>(v, band, vc, kc, rows, state.by_key, turned, s.read_turned, ahead);
        transpose(s.read_turned, C, band, rows, deltas + v, vc);
        for (std::size_t i = 0; i < rows; ++i) {
            const auto e = hn::Set(d, s.gates.decay[i]), beta = hn::Set(d, s.gates.beta[i]);
            for (std::size_t j = i * vc + v; j < i * vc + v + band; j += lanes()) {
                const auto eu = hn::Mul(e, hn::Load(d, deltas + j));
                hn::Store(eu, d, decayed_reads + j);
                hn::Store(hn::Mul(beta, hn::Sub(hn::Load(d, values + j), eu)), d, deltas + j);
            }
        }
        substitute(s.lower, deltas + v, vc, band, rows);
    }

    // One chunk of pass one of the head in `slot`.
    HWY_INLINE void recompute(std::size_t slot) {
        enter_head(slot);
        fill_matrices(false);
        load_rows(call.v, head, dim_v, vc, values);
        const std::size_t next = static_cast<std::size_t>(first) / C + 1;
        const bool last = next >= used_chunks();  // nobody asks for the final state
        RowsAhead ahead;
        if (!last || slot + 1 < heads) ask_ahead(call.v, slot, next, ahead);
        if (!last && round == 0 && slot + 1 == heads) {
            const std::int64_t begin = task.span.begin + std::int64_t(next * C);
            const std::int64_t end = std::min(begin + std::int64_t(C), task.span.begin + task.span.length);
            ahead.add(call.k, task.span.batch, begin, end, task.key_head, 0, dim_k);
            ahead.add(call.q, task.span.batch, begin, end, task.key_head, 0, dim_k);
        }
        if (!last && keeps_far)
            for (const float* x : {values, deltas, decayed_reads}) ahead.add(x + C * vc, C * vc);
        ahead.spread(vc / kTileRows * (kc + (last ? 0 : kc / strip_columns() * rows)) / kDepth);
        for (std::size_t v = 0; v < vc; v += band) {
            make_deltas(v, ahead);
            if (!last) s.x.from_channel(v).fill_by_token(deltas + v, vc, s.gates.rest, band, rows);
        }
        if (last) return;
        const Term<Operand> term{s.x.by_token, k_by_token};
        const StateForms<Operand> leaving = entering(next, slot);
        for (std::size_t p = 0; p < kc / strip_columns(); ++p)
            update_state(p, vc, kc, rows, s.gates.total, state.sum, &term, 1, leaving, ahead);
    }

    // What pass two reads and writes after the head in `slot`: the next head's rows, and after the last head's products
    // the gradients of the key head.
    HWY_INLINE RowsAhead rows_after(std::size_t slot) const {
        RowsAhead ahead;
        if (first > 0 || slot + 1 < heads) {
            const std::size_t next = static_cast<std::size_t>(first) / C - 1;  // not looked at in the first chunk
            ask_ahead(call.d_o, slot, next, ahead);
            if (!task.adjoint_out) ask_ahead(call.d_v, slot, next, ahead);
            const std::size_t to = slot + 1 < heads ? slot + 1 : 0, chunk = slot + 1 < heads ? next + 1 : next;
            if (keeps_far)
                for (const float* x : {s.deltas, s.decayed_reads, s.values})
                    ahead.add(x + (to * tokens + chunk * C) * vc, C * vc);
        }
        if (!task.adjoint_out && slot + 1 == heads && round + heads == group) {
            const std::int64_t begin = task.span.begin + first, end = begin + std::int64_t(n);
            ahead.add(call.d_q, task.span.batch, begin, end, task.key_head, 0, dim_k);
            ahead.add(call.d_k, task.span.batch, begin, end, task.key_head, 0, dim_k);
        }
        const std::size_t strips = kc / strip_columns(), updates = vc / kTileRows * rows * (1 + kDepth);
        const std::size_t gradients = task.adjoint_out ? 0 : rows / kTileRows * 3 * vc;
        ahead.spread((vc / kTileRows * kc + strips * (updates + gradients)) / kDepth);
        return ahead;
    }

    // One chunk of pass two of the head in `slot`.
    HWY_INLINE void chunk_back(std::size_t slot) {
        enter_head(slot);
        fill_matrices(true);
        const ChunkGates& g = s.gates;
        load_rows(call.d_o, head, dim_v, vc, s.d_o_rows);

        for (std::size_t i = 0; i < rows; ++i) {
            s.u_factor[i] = -g.beta[i] * g.decay[i] / adjoint_scale;
            s.q_factor[i] = g.decay[i] / adjoint_scale;
        }
        RowsAhead ahead = rows_after(slot);
        fill(s.sums, 3 * C * lanes(), 0.0f);
        for (std::size_t v = 0; v < vc; v += band) {
            solve_back(v, ahead);
            s.d_o.from_channel(v).fill(s.d_o_rows + v, vc, nullptr, band, rows);
            s.d_u.from_channel(v).fill(s.w + v, vc, s.u_factor, band, rows);
            if constexpr (kDepth == 2)
                s.d_u.fill_residual(s.w + v, vc, s.u_factor, band, rows, s.d_u_residual + v * (C / kDepth));
            if (!task.adjoint_out) prepare_small_products(v);
        }
        // <r X, K D> is where the decay to the chunk's end enters gamma. The last token's own would be subtracted from
        // itself.
        double to_end = 0.0;
        for (std::size_t i = 0; i < rows; ++i) {
            const float part = i + 1 < n ? sum_of(i, 0) : 0.0f;
            s.d_gamma[i] = -part;
            to_end += part;
        }
        if (!task.adjoint_out) {
            // <X_j, W'_i> and <X_j, dO_i>
            products_of_rows(vc, rows, s.x_floats.by_channel, s.both_turned, 2 * C, C, s.d_lower, s.d_upper);
            weigh_products();
            sum_gains();
            value_gradients();
        }

        // D <- exp(gamma_C) D + K^T U' + Q^T (e dO), strip by strip of K, after all that reads D and S there.
        rows_by_token<Operand>(q, s.q_factor, kc, rows, s.q_by_token);
        Term<Operand> terms[3] = {{s.d_u.by_token, k_by_token}, {s.d_o.by_token, s.q_by_token}};
        if constexpr (kDepth == 2) terms[2] = {s.d_u_residual, k_by_token};
        double along_states = 0.0;
        for (std::size_t p = 0; p < kc / strip_columns(); ++p) {
            if (!task.adjoint_out) along_states += token_gradients(p, ahead);
            update_state(p, vc, kc, rows, g.total, adjoint.sum, terms, 1 + kDepth, adjoint, ahead);
        }
        if (task.adjoint_out) return;
        // The chunk's whole decay: <D, S> and the ends of all r.
        s.d_gamma[n - 1] += to_end + g.total * adjoint_scale * along_states;
        for (std::size_t i = n; i < rows; ++i) s.d_gamma[n - 1] += s.d_gamma[i];
        store_gates();
    }

    // Strip p of K: d Q^ and d K^ of the chunk's tokens. Returns the strip's part of <D, S> / adjoint_scale.
    HWY_INLINE double token_gradients(std::size_t p, RowsAhead& ahead) const {
        const std::size_t strip = strip_columns(), at = p * strip * vc;
        const float* sums = state.sum + at;
        const double along = dot_strips<Operand>(vc, adjoint.sum + at, sums, s.state_by_value);
        if constexpr (kDepth == 1) {
            query_gradients(p * strip, sums, ahead);
            key_gradients(p * strip, sums, adjoint.sum + at, ahead);
        } else {
            query_gradients(p * strip, s.state_by_value, ahead);
            key_gradients(p * strip, s.state_by_value, adjoint.by_value + at / kDepth, ahead);
        }
        return along;
    }

    // X' = r (K D) + P^T dO and from it W', in the band of columns at v.
    HWY_INLINE void solve_back(std::size_t v, RowsAhead& ahead) const {
        const FloatTag d;
        read_state<Operand>(v, band, vc, kc, rows, adjoint.by_key, turned, s.read_turned, ahead);
        transpose(s.read_turned, C, band, rows, s.w + v, vc);
        for (std::size_t i = 0; i < rows; ++i) {
            const auto f = hn::Set(d, adjoint_scale * s.gates.rest[i]);
            float* sums = s.sums + 3 * i * lanes();
            auto sum = hn::Load(d, sums);
            for (std::size_t j = i * vc + v; j < i * vc + v + band; j += lanes()) {
                const auto x = hn::Mul(f, hn::Load(d, s.w + j));
                hn::Store(x, d, s.w + j);
                sum = hn::MulAdd(x, hn::Load(d, deltas + j), sum);
            }
            hn::Store(sum, d, sums);
        }
        for (std::size_t j = v; j < v + band; j += 2 * lanes()) add_outputs_back(j);
        substitute_back(s.lower, s.w + v, vc, band, rows);
    }

    // W' += P^T dO in a strip of columns, before the substitution.
    HWY_NOINLINE void add_outputs_back(std::size_t v) const {
        using Dot = FloatDot;
        const FloatTag d;
        for (std::size_t j = 0; j < rows; j += kTileRows) {
            FQLA_TILE_ZERO()
            FQLA_TILE_OVER_ROWS(j, rows, s.upper + j * C, C, s.d_o_rows + v, vc, lanes())
            FQLA_TILE_ADD_TO(s.w + j * vc + v, vc)
        }
    }

    // Operands of <X_j, W'_i> and <X_j, dO_i>, and what W' gives to beta and gamma, from the band of columns at v.
    HWY_INLINE void prepare_small_products(std::size_t v) const {
        const FloatTag d;
        s.x.from_channel(v).fill_by_channel(deltas + v, vc, nullptr, band, rows);
        if constexpr (kDepth == 2) s.x_floats.from_channel(v).fill_by_channel(deltas + v, vc, nullptr, band, rows);
        transpose(s.w + v, vc, rows, band, s.both_turned + v * 2 * C, 2 * C);
        transpose(s.d_o_rows + v, vc, rows, band, s.both_turned + v * 2 * C + C, 2 * C);
        for (std::size_t i = 0; i < rows; ++i) {
            float* sums = s.sums + (3 * i + 1) * lanes();
            auto with_read = hn::Load(d, sums), with_rest = hn::Load(d, sums + lanes());
            for (std::size_t j = i * vc + v; j < i * vc + v + band; j += lanes()) {
                const auto w = hn::Load(d, s.w + j), read = hn::Load(d, decayed_reads + j);
                with_read = hn::MulAdd(w, read, with_read);                                    // <U', U>
                with_rest = hn::MulAdd(w, hn::Sub(hn::Load(d, values + j), read), with_rest);  // <W', R>
            }
            hn::Store(with_read, d, sums), hn::Store(with_rest, d, sums + lanes());
        }
    }

    HWY_INLINE float sum_of(std::size_t token, std::size_t which) const {
        const FloatTag d;
        return hn::GetLane(hn::SumOfLanes(d, hn::Load(d, s.sums + (3 * token + which) * lanes())));
    }

    // From the products of rows Gamma P' and Z, and what they give to beta and gamma.
    HWY_INLINE void weigh_products() const {
        const FloatTag d;
        fill(s.d_beta, C, 0.0f);
        const auto end = hn::Set(d, static_cast<float>(n));
        for (std::size_t j = 0; j < rows; ++j) {
            const std::size_t begin = j / lanes() * lanes();
            for (float* row : {s.weight, s.z, s.gain}) fill(row + j * C, begin, 0.0f);
            const auto diagonal = hn::Set(d, static_cast<float>(j));
            for (std::size_t i = begin; i < rows; i += lanes()) {
                const std::size_t ji = j * C + i;
                const auto index = hn::Iota(d, static_cast<float>(i));
                const auto live = hn::Lt(index, end);
                const auto below = hn::And(live, hn::Gt(index, diagonal));
                const auto gamma = hn::Load(d, s.gamma + ji), kk = hn::Load(d, gram_k + ji);
                const auto p = hn::IfThenElseZero(hn::And(live, hn::Ge(index, diagonal)),
                                                  hn::Mul(gamma, hn::Load(d, s.d_upper + ji)));
                const auto l = hn::IfThenElseZero(below, hn::Neg(hn::Mul(gamma, hn::Load(d, s.d_lower + ji))));
                const auto z = hn::Mul(hn::Load(d, s.gates.beta + i), l);
                hn::Store(p, d, s.weight + ji);
                hn::Store(z, d, s.z + ji);
                const auto gain = hn::MulAdd(p, hn::Load(d, gram_q + ji), hn::Mul(z, kk));
                hn::Store(hn::IfThenElseZero(below, gain), d, s.gain + ji);
                const auto to_beta = hn::IfThenElseZero(below, hn::Mul(l, kk));
                hn::Store(hn::Add(hn::Load(d, s.d_beta + i), to_beta), d, s.d_beta + i);
            }
        }
    }

    // gain_ji enters gamma at token i and leaves it at token j.
    HWY_INLINE void sum_gains() const {
        const hn::CappedTag<double, 8> d;
        const hn::Rebind<float, decltype(d)> df;
        for (std::size_t j = 0; j < n; ++j) {
            auto leaves = hn::Zero(d);
            for (std::size_t i = j / lanes() * lanes(); i < rows; i += hn::Lanes(d)) {
                const auto gain = hn::PromoteTo(d, hn::LoadU(df, s.gain + j * C + i));
                hn::StoreU(hn::Add(hn::LoadU(d, s.d_gamma + i), gain), d, s.d_gamma + i);
                leaves = hn::Add(leaves, gain);
            }
            s.d_gamma[j] -= hn::GetLane(hn::SumOfLanes(d, leaves));
        }
    }

    // dV = beta W', and the sums of W' that belong to beta and gamma.
    HWY_INLINE void value_gradients() {
        const FloatTag d;
        for (std::size_t i = 0; i < n; ++i) {
            const float beta = s.gates.beta[i];
            s.d_beta[i] += sum_of(i, 2);
            s.d_gamma[i] -= double(beta) * sum_of(i, 1);
            if (!call.d_v) continue;
            const auto b = hn::Set(d, beta);
            for (std::size_t j = 0; j < vc; j += lanes())
                hn::Store(hn::Mul(b, hn::Load(d, s.w + i * vc + j)), d, s.row + j);
            store_row(s.row, dim_v, call.d_v.data, call.d_v.dtype, at(call.d_v, i, head));
        }
    }

    // dQ^ += e (dO S^T) + (Gamma P') K in the strip of K at j. <q, e (dO S^T)> is where the decay since the chunk's
    // start enters gamma.
    HWY_NOINLINE void query_gradients(std::size_t j, const Element* state_strip, RowsAhead& ahead) const {
        const FloatTag d;
        const std::size_t l = lanes();
        for (std::size_t i = 0; i < rows; i += kTileRows) {
            ahead.step(vc / kDepth);
            FQLA_TILE_ZERO() {
                using Dot = Operand;
                FQLA_TILE_OVER_K(vc / kDepth / kTileRows, s.d_o.by_channel + i * kTileRows, C, state_strip, 2 * l, l)
            }
            const float* queries = q + i * kc + j;
#define FQLA_ROW(r)                                         \
    x##r = hn::Mul(hn::Set(d, s.gates.decay[i + r]), x##r); \
    y##r = hn::Mul(hn::Set(d, s.gates.decay[i + r]), y##r); \
    s.d_gamma[i + r] += hn::GetLane(hn::SumOfLanes(         \
        d, hn::MulAdd(x##r, hn::Load(d, queries + r * kc), hn::Mul(y##r, hn::Load(d, queries + r * kc + l)))));
            FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
            using Dot = FloatDot;
            FQLA_TILE_OVER_TURNED(0, i + kTileRows, s.weight + i, C, k + j, kc, l)
            FQLA_TILE_ADD_TO(d_q + i * kc + j, kc)
        }
    }

    // dK^ += r (X D^T) + U' S^T + (Gamma P')^T Q + (Z + Z^T) K in the strip of K at j.
    HWY_NOINLINE void key_gradients(std::size_t j, const Element* state_strip, const Element* adjoint_strip,
                                    RowsAhead& ahead) const {
        const FloatTag d;
        const std::size_t l = lanes(), blocks = vc / kDepth / kTileRows;
        for (std::size_t i = 0; i < rows; i += kTileRows) {
            ahead.step(2 * vc / kDepth);
            FQLA_TILE_ZERO() {
                using Dot = Operand;
                FQLA_TILE_OVER_K(blocks, s.x.by_channel + i * kTileRows, C, adjoint_strip, 2 * l, l)
#define FQLA_ROW(r)                                        \
    x##r = hn::Mul(hn::Set(d, s.gates.rest[i + r]), x##r); \
    y##r = hn::Mul(hn::Set(d, s.gates.rest[i + r]), y##r);
                FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
                FQLA_TILE_OVER_K(blocks, s.d_u.by_channel + i * kTileRows, C, state_strip, 2 * l, l)
                if (adjoint_scale != 1.0f) {
                    const auto scale = hn::Set(d, adjoint_scale);
#define FQLA_ROW(r)              \
    x##r = hn::Mul(scale, x##r); \
    y##r = hn::Mul(scale, y##r);
                    FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
                }
            }
            using Dot = FloatDot;
            FQLA_TILE_OVER_ROWS(i, rows, s.weight + i * C, C, q + j, kc, l)
            FQLA_TILE_OVER_TURNED(0, i + kTileRows, s.z + i, C, k + j, kc, l)
            FQLA_TILE_OVER_ROWS(i, rows, s.z + i * C, C, k + j, kc, l)
            FQLA_TILE_ADD_TO(d_k + i * kc + j, kc)
        }
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

    // A chunk's gradients through the norms: d x = n (d x^ - x^ <x^, d x^>), x^ = n x; queries carry scale on top.
    HWY_INLINE void store_tokens(const TokenRef& x, const TokenRef& to, float factor, float* grad) const {
        if (!to) return;
        for (std::size_t t = 0; t < n; ++t) {
            float* row = grad + t * kc;
            if (call.problem.qk_l2norm) {
                load_row(x.data, x.dtype, at(x, t, task.key_head), dim_k, s.row);
                for (std::size_t j = dim_k; j < kc; ++j) s.row[j] = 0.0f;
                const float norm = inverse_norm(call, s.row, dim_k);
                const float along = dot(s.row, row, kc) * norm * norm;
                for (std::size_t j = 0; j < dim_k; ++j) row[j] = factor * norm * (row[j] - along * s.row[j]);
            } else if (factor != 1.0f) {
                scale_row(row, kc, factor);
            }
            store_row(row, dim_k, to.data, to.dtype, at(to, t, task.key_head));
        }
    }

    // The states that the round's heads start from, and their adjoints at the end.
    HWY_INLINE void load_states() {
        for (std::size_t slot = 0; slot < heads; ++slot) {
            head = call.value_head(task.key_head, static_cast<std::int32_t>(round + slot));
            if (task.first)
                load_turned(call.initial_state, task.sequence, 1.0f, entering(0, slot));
            else
                load_turned(carry_ref(task.carry_in), 0, 1.0f, entering(0, slot));
        }
    }

    HWY_INLINE void load_adjoints() {
        for (std::size_t slot = 0; slot < heads; ++slot) {
            head = call.value_head(task.key_head, static_cast<std::int32_t>(round + slot));
            if (task.last)
                load_turned(call.d_final_state, task.sequence, 1.0f / adjoint_scale, adjoint_of(slot));
            else
                load_turned(carry_ref(task.adjoint_in), 0, 1.0f / adjoint_scale, adjoint_of(slot));
        }
    }

    HWY_INLINE void store_adjoints() {
        for (std::size_t slot = 0; slot < heads; ++slot) {
            head = call.value_head(task.key_head, static_cast<std::int32_t>(round + slot));
            adjoint = adjoint_of(slot);
            if (task.adjoint_out)
                store_adjoint(carry_ref(task.adjoint_out), 0);
            else if (task.first && call.d_initial_state)
                store_adjoint(call.d_initial_state, task.sequence);
        }
    }

    HWY_INLINE void run_round() {
        load_states();
        for (std::size_t chunk = 0; chunk < used_chunks(); ++chunk) {
            enter_chunk(chunk);
            if (round == 0) load_keys();
            for (std::size_t slot = 0; slot < heads; ++slot) recompute(slot);
        }
        load_adjoints();
        for (std::size_t chunk = used_chunks(); chunk-- > 0;) {
            enter_chunk(chunk);
            if (round == 0) {
                fill(d_q, rows * kc, 0.0f);
                fill(d_k, rows * kc, 0.0f);
            }
            for (std::size_t slot = 0; slot < heads; ++slot) chunk_back(slot);
            if (task.adjoint_out || round + heads < group) continue;
            store_tokens(call.q, call.d_q, call.problem.scale, d_q);
            store_tokens(call.k, call.d_k, 1.0f, d_k);
        }
        store_adjoints();
    }

    HWY_INLINE void run() {
        for (round = 0; round < group; round += most_heads) {
            heads = std::min(most_heads, group - round);
            run_round();
        }
    }
};

template <class Operand>
HWY_NOINLINE void backward_chunks(const BackwardTask& task, std::byte* scratch) {
    BackwardRun<Operand>(task, scratch).run();
}

void backward_task(const BackwardTask& task, std::byte* scratch) {
#if FQLA_HAVE_BF16_DOT
    if (task.shape.bf16_dot) return backward_chunks<PairDot>(task, scratch);
#endif
    backward_chunks<FloatDot>(task, scratch);
}

template <class Operand>
std::size_t backward_bytes(const Shape& shape, std::int64_t tokens) {
    BackwardScratch<Operand> s;
    Taker taker{nullptr};
    s.book(taker, whole_strips(static_cast<std::size_t>(shape.dim_k)),
           whole_strips(static_cast<std::size_t>(shape.dim_v)), static_cast<std::size_t>(tokens),
           static_cast<std::size_t>(shape.group));
    return taker.bytes();
}

std::size_t backward_scratch(const Shape& shape, std::int64_t tokens) {
#if FQLA_HAVE_BF16_DOT
    if (shape.bf16_dot) return backward_bytes<PairDot>(shape, tokens);
#endif
    return backward_bytes<FloatDot>(shape, tokens);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashqla::cpu
FQLA_END_TARGET

#endif  // toggled guard
