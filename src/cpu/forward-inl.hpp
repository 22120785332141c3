// The chunked forward pass of one task. Compiled per target.
//
// For a chunk of C tokens with entering state S, running gate sums gamma, e = exp(gamma), Gamma_ij = exp(gamma_i -
// gamma_j), row norms folded into k^ = n_k k and q^ = scale n_q q (docs/math.md, "The chunk"):
//   U = K^ S                     X solves (I + L) X = beta (V - e U),    L = stril(beta Gamma K^ K^^T)
//   O = e (Q^ S) + P X           P = tril(Gamma Q^ K^^T)
//   S <- exp(gamma_C) S + K^^T (exp(gamma_C - gamma) X)
// No inverse is formed: substitution costs as much as multiplying by it, and is exact to fp32 for any keys.
//
// The state of a task is kept divided by a scalar `lag` (the decay not yet applied), so that most chunks add to it
// without a multiplication; the scalar is folded in when it falls below kSmallestLag.

// NOTE: the guard toggles, see simd-inl.hpp.
#if defined(FQLA_CPU_FORWARD_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FQLA_CPU_FORWARD_INL_HPP_
#undef FQLA_CPU_FORWARD_INL_HPP_
#else
#define FQLA_CPU_FORWARD_INL_HPP_
#endif

#include <algorithm>

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

inline constexpr float kSmallestLag = 0x1p-20f;

// Tokens of a chunk. Long chunks share more, short ones waste less on the triangles; bf16 pairs also convert the state
// once a chunk. Measured on Zen 4 (docs/kernels/cpu.md).
template <class Dot>
inline constexpr std::size_t kChunkTokens = Dot::kDepth == 1 ? 16 : 32;

// Scratch of a forward task.
template <class Dot>
struct ForwardScratch {
    using Element = typename Dot::Element;
    static constexpr std::size_t C = kChunkTokens<Dot>;

    ChunkKeys<Dot, C> keys;
    ChunkGates gates;
    float* lower;      // [C,C] -L transposed: lower[j*C + i]
    float* upper;      // [C,C] P transposed
    float* from_u;     // [C] factor of U in the right-hand side
    float* from_o;     // [C] factor of Q S in the output
    float* to_state;   // [C] factor of X in the state update
    float* values;     // [C, slice] beta V of one head: rows of a token tensor lie a large power of two apart and would
    float* outputs;    // [C, slice] evict each other from the first-level cache if every strip went there itself
    float* x;          // [C, strip]
    Element* x_state;  // [C/depth, strip] X as operand of the state update
    float* turn;       // [strip, padded_k]
    float* lag;        // [heads] value heads of the task
    float* state;      // [heads, strips, padded_k, strip]
    Element* operand;  // the same as operand of K S and Q S; the same memory as `state` for floats

    template <class Booker>
    void book(Booker& b, const Shape& s) {
        const std::size_t pk = padded_rows<Dot>(static_cast<std::size_t>(s.dim_k));
        const std::size_t heads = static_cast<std::size_t>(s.group) * static_cast<std::size_t>(s.key_heads);
        const std::size_t tiles = heads * static_cast<std::size_t>(s.slice_strips);
        keys.book(b, pk);
        b.take(gates.high, C), b.take(gates.low, C), b.take(gates.decay, C), b.take(gates.rest, C);
        b.take(gates.beta, C);
        b.take(lower, C * C), b.take(upper, C * C);
        b.take(from_u, C), b.take(from_o, C), b.take(to_state, C);
        const std::size_t slice = static_cast<std::size_t>(s.slice_strips) * strip_columns();
        b.take(values, C * slice), b.take(outputs, C * slice);
        b.take(x, C * strip_columns()), b.take(x_state, C / Dot::kDepth * strip_columns());
        b.take(turn, strip_columns() * pk);
        b.take(lag, heads);
        b.take(state, tiles * pk * strip_columns());
        if constexpr (Dot::kDepth == 1)
            operand = state;
        else
            b.take(operand, tiles * pk / Dot::kDepth * strip_columns());
    }
};

// Rows of the tile rounded to bf16, two rows to a row of words.
#ifndef FQLA_TILE_STORE_PAIRS
#define FQLA_TILE_STORE_COUPLE(i, j)                                              \
    hn::Store(bf16_pair(x##i, x##j), WordTag(), fqla_to + i / 2 * (2 * lanes())); \
    hn::Store(bf16_pair(y##i, y##j), WordTag(), fqla_to + i / 2 * (2 * lanes()) + lanes());
#define FQLA_TILE_STORE_PAIRS(to)                \
    {                                            \
        auto* fqla_to = (to);                    \
        FQLA_EACH_COUPLE(FQLA_TILE_STORE_COUPLE) \
    }
#endif

// One value head's view of a chunk.
template <class Dot>
struct HeadChunk {
    static constexpr std::size_t C = kChunkTokens<Dot>;
    using Element = typename Dot::Element;

    const ForwardTask& task;
    ForwardScratch<Dot>& s;
    std::int64_t first;   // the chunk's first token in the segment
    std::size_t n, rows;  // tokens, and tokens padded to whole tiles
    std::int32_t head;
    float rescale;                          // factor of the stored state in this chunk; 1 = left alone
    std::size_t v_begin, v_columns, slice;  // the task's value columns, and their number padded to strips

    // Small matrices and row factors for the lag at entry; returns the lag at exit.
    HWY_INLINE float prepare(float lag) {
        const FloatTag d;
        s.gates.fill(*task.call, task.span, first, n, rows, head);
        const float entering = lag * s.gates.total;
        const bool fold = entering < kSmallestLag;
        rescale = fold ? entering : 1.0f;
        const float* norm_k = s.keys.norm_k;
        const float* norm_q = s.keys.norm_q;  // includes scale
        for (std::size_t i = 0; i < rows; ++i) {
            s.from_u[i] = -s.gates.beta[i] * s.gates.decay[i] * norm_k[i] * lag;
            s.from_o[i] = s.gates.decay[i] * norm_q[i] * lag;
            s.to_state[i] = s.gates.rest[i] * norm_k[i] / (fold ? 1.0f : entering);
        }
        for (std::size_t j = 0; j < rows; ++j) {
            const auto nk = hn::Set(d, norm_k[j]);
            for (std::size_t i = j / lanes() * lanes(); i < rows; i += lanes()) {
                const auto gamma = hn::Mul(s.gates.between(i, j), nk);
                const auto row_k = hn::Mul(hn::Load(d, s.gates.beta + i), hn::Load(d, norm_k + i));
                const auto kk = hn::Mul(hn::Mul(gamma, row_k), hn::Load(d, s.keys.gram_k + j * C + i));
                const auto kq =
                    hn::Mul(hn::Mul(gamma, hn::Load(d, norm_q + i)), hn::Load(d, s.keys.gram_q + j * C + i));
                hn::Store(hn::Neg(kk), d, s.lower + j * C + i);
                hn::Store(kq, d, s.upper + j * C + i);
            }
        }
        return fold ? 1.0f : entering;
    }

    HWY_INLINE void load_values() {
        const TokenRef& v = task.call->v;
        for (std::size_t i = 0; i < rows; ++i) {
            float* row = s.values + i * slice;
            const std::size_t used = i < n && !task.transition ? v_columns : 0;
            if (used) {
                load_row(v.data, v.dtype, at(v, i, v_begin), used, row);
                scale_row(row, slice, s.gates.beta[i]);
            }
            for (std::size_t j = used; j < slice; ++j) row[j] = 0.0f;
        }
    }

    HWY_INLINE void store_outputs() const {
        const TokenRef& o = task.call->o;
        for (std::size_t i = 0; i < n; ++i)
            store_row(s.outputs + i * slice, v_columns, o.data, o.dtype, at(o, i, v_begin));
    }

    // Strip p of the task.
    HWY_INLINE void run_strip(std::size_t p, float* state, Element* operand, RowsAhead& ahead) {
        const std::size_t v = p * strip_columns();
        for (std::size_t i0 = 0; i0 < rows; i0 += kTileRows) solve(i0, v, operand);
        if (task.write_output)
            for (std::size_t i0 = 0; i0 < rows; i0 += kTileRows) output(i0, v, operand);
        for (std::size_t k = 0; k < s.keys.pk; k += kTileRows) {
            ahead.step();
            update(k, state, operand);
        }
    }

private:
    std::int64_t at(const TokenRef& x, std::size_t i, std::size_t v0) const {
        return x.offset(task.span.batch, task.span.begin + first + std::int64_t(i), head) + std::int64_t(v0);
    }

    // X[i0..] = beta V + from_u (K S) + sum_{j < i0} (-L) X, then the tile's own triangle in registers.
    HWY_NOINLINE void solve(std::size_t i0, std::size_t v, const Element* operand) {
        const FloatTag d;
        const std::size_t l = lanes(), strip = 2 * l;
        FQLA_TILE_ZERO()
        FQLA_TILE_OVER_K(s.keys.depth_k / kTileRows, s.keys.keys + i0 * kTileRows, C, operand, strip, l)
        const float *from_u = s.from_u + i0, *values = s.values + i0 * slice + v;
#define FQLA_ROW(i)                                                                  \
    x##i = hn::MulAdd(hn::Set(d, from_u[i]), x##i, hn::Load(d, values + i * slice)); \
    y##i = hn::MulAdd(hn::Set(d, from_u[i]), y##i, hn::Load(d, values + i * slice + l));
        FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
        const float* lower = s.lower + i0;
        for (std::size_t j = 0; j < i0; ++j, lower += C) {
            const auto b0 = hn::Load(d, s.x + j * strip), b1 = hn::Load(d, s.x + j * strip + l);
#define FQLA_ROW(i)                                    \
    x##i = hn::MulAdd(hn::Set(d, lower[i]), b0, x##i); \
    y##i = hn::MulAdd(hn::Set(d, lower[i]), b1, y##i);
            FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
        }
#define FQLA_PAIR(j, i)                                          \
    x##i = hn::MulAdd(hn::Set(d, lower[j * C + i]), x##j, x##i); \
    y##i = hn::MulAdd(hn::Set(d, lower[j * C + i]), y##j, y##i);
        FQLA_EACH_PAIR(FQLA_PAIR)
#undef FQLA_PAIR
        const float* factor = s.to_state + i0;
#define FQLA_ROW(i)                                 \
    hn::Store(x##i, d, s.x + (i0 + i) * strip);     \
    hn::Store(y##i, d, s.x + (i0 + i) * strip + l); \
    x##i = hn::Mul(hn::Set(d, factor[i]), x##i);    \
    y##i = hn::Mul(hn::Set(d, factor[i]), y##i);
        FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
        Element* to = s.x_state + i0 / Dot::kDepth * strip;
        if constexpr (Dot::kDepth == 1) {
#define FQLA_ROW(i)                     \
    hn::Store(x##i, d, to + i * strip); \
    hn::Store(y##i, d, to + i * strip + l);
            FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
        } else {
            FQLA_TILE_STORE_PAIRS(to)
        }
    }

    // O[i0..] = from_o (Q S) + P X
    HWY_NOINLINE void output(std::size_t i0, std::size_t v, const Element* operand) {
        const FloatTag d;
        const std::size_t l = lanes(), strip = 2 * l;
        FQLA_TILE_ZERO()
        FQLA_TILE_OVER_K(s.keys.depth_k / kTileRows, s.keys.queries + i0 * kTileRows, C, operand, strip, l)
#define FQLA_ROW(i)                                     \
    x##i = hn::Mul(hn::Set(d, s.from_o[i0 + i]), x##i); \
    y##i = hn::Mul(hn::Set(d, s.from_o[i0 + i]), y##i);
        FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
        const float* upper = s.upper + i0;
        for (std::size_t j = 0; j < i0; ++j, upper += C) {
            const auto b0 = hn::Load(d, s.x + j * strip), b1 = hn::Load(d, s.x + j * strip + l);
#define FQLA_ROW(i)                                    \
    x##i = hn::MulAdd(hn::Set(d, upper[i]), b0, x##i); \
    y##i = hn::MulAdd(hn::Set(d, upper[i]), b1, y##i);
            FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
        }
        // The tile's own triangle, pair by pair: a product with the zeros above the diagonal would carry a NaN back in
        // time.
        const float* own = s.x + i0 * strip;
#define FQLA_PAIR(j, i)                                                                  \
    x##i = hn::MulAdd(hn::Set(d, upper[j * C + i]), hn::Load(d, own + j * strip), x##i); \
    y##i = hn::MulAdd(hn::Set(d, upper[j * C + i]), hn::Load(d, own + j * strip + l), y##i);
#define FQLA_ROW(i) FQLA_PAIR(i, i)
        FQLA_EACH_ROW(FQLA_ROW)
        FQLA_EACH_PAIR(FQLA_PAIR)
#undef FQLA_ROW
#undef FQLA_PAIR
        float* to = s.outputs + i0 * slice + v;
#define FQLA_ROW(i)                     \
    hn::Store(x##i, d, to + i * slice); \
    hn::Store(y##i, d, to + i * slice + l);
        FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
    }

    // S[k0..] = rescale S + K^T X
    HWY_NOINLINE void update(std::size_t k0, float* state, Element* operand) {
        const FloatTag d;
        const std::size_t l = lanes(), strip = 2 * l;
        float* to = state + k0 * strip;
#define FQLA_ROW(i) auto x##i = hn::Load(d, to + i * strip), y##i = hn::Load(d, to + i * strip + l);
        FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
        if (rescale != 1.0f) {
            const auto factor = hn::Set(d, rescale);
#define FQLA_ROW(i)               \
    x##i = hn::Mul(factor, x##i); \
    y##i = hn::Mul(factor, y##i);
            FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
        }
        const Element* block = s.keys.by_token + k0 / kTileRows * (C / Dot::kDepth * kTileRows);
        FQLA_TILE_OVER_TOKENS(rows / Dot::kDepth, block, s.x_state, strip, l)
#define FQLA_ROW(i)                     \
    hn::Store(x##i, d, to + i * strip); \
    hn::Store(y##i, d, to + i * strip + l);
        FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
        if constexpr (Dot::kDepth == 2) {
            Element* pairs = operand + k0 / 2 * strip;
            FQLA_TILE_STORE_PAIRS(pairs)
        }
    }
};

// A task from its first to its last token. Chunks are the outer loop and heads the inner one: neighbouring heads of a
// token share a page, and one pass over the tokens per head would miss the TLB at every row.
template <class Dot>
struct ForwardRun {
    static constexpr std::size_t C = kChunkTokens<Dot>;
    using Element = typename Dot::Element;

    // A strip of value columns of one head, with its place in the state.
    struct Strip {
        std::int32_t head;
        std::size_t lag;  // index of the head's lag
        std::size_t v0, columns;
        float* state;
        Element* operand;
    };

    const ForwardTask& task;
    const ForwardCall& call;
    ForwardScratch<Dot> s;
    std::size_t dim_k, pk, width, group, strips;
    HeadChunk<Dot> chunk;

    ForwardRun(const ForwardTask& t, std::byte* scratch)
        : task(t),
          call(*t.call),
          dim_k(static_cast<std::size_t>(t.shape.dim_k)),
          pk(padded_rows<Dot>(dim_k)),
          width(static_cast<std::size_t>(t.transition ? t.shape.dim_k : t.shape.dim_v)),
          group(static_cast<std::size_t>(t.shape.group)),
          strips(static_cast<std::size_t>(t.strip_end - t.strip_begin)),
          chunk{t, s, 0, 0, 0, 0, 1.0f, 0, 0, 0} {
        Taker taker{scratch};
        s.book(taker, t.shape);
        chunk.v_begin = static_cast<std::size_t>(t.strip_begin) * strip_columns();
        chunk.v_columns = std::min(strips * strip_columns(), width - chunk.v_begin);
        chunk.slice = strips * strip_columns();
    }

    HWY_INLINE Strip strip(std::int32_t key_head, std::size_t r, std::size_t p) const {
        const std::size_t lag = static_cast<std::size_t>(key_head - task.key_begin) * group + r;
        const std::size_t at = lag * static_cast<std::size_t>(task.shape.slice_strips) + p;
        const std::size_t v0 = (static_cast<std::size_t>(task.strip_begin) + p) * strip_columns();
        return {call.value_head(key_head, static_cast<std::int32_t>(r)),
                lag,
                v0,
                std::min(strip_columns(), width - v0),
                s.state + at * pk * strip_columns(),
                s.operand + at * (pk / Dot::kDepth) * strip_columns()};
    }

    template <class F>
    HWY_INLINE void each_strip(F&& f) {
        for (std::int32_t h = task.key_begin; h < task.key_end; ++h)
            for (std::size_t r = 0; r < group; ++r)
                for (std::size_t p = 0; p < strips; ++p) f(strip(h, r, p));
    }

    HWY_INLINE Tile tile(const Strip& at) const { return {at.state, strip_columns(), dim_k, pk}; }

    HWY_INLINE StateRef carry_ref(const float* data) const {
        return {const_cast<float*>(data), DType::f32, 1, 0, std::int64_t(dim_k * width), std::int64_t(width), 1, 0};
    }

    HWY_INLINE void start() {
        each_strip([&](const Strip& at) {
            s.lag[at.lag] = 1.0f;
            if (task.from == StateEnd::call && task.slots.read >= 0) {
                load_tile(call.initial_state, task.slots.read, at.head, at.v0, at.columns, tile(at), s.turn);
            } else if (task.from == StateEnd::carry) {
                load_tile(carry_ref(task.carry_in), 0, at.head, at.v0, at.columns, tile(at), s.turn);
            } else {
                fill(at.state, pk * strip_columns(), 0.0f);
                if (task.from == StateEnd::identity)
                    for (std::size_t j = 0; j < at.columns; ++j) at.state[(at.v0 + j) * strip_columns() + j] = 1.0f;
            }
            make_operand<Dot>(at.state, pk, at.operand);
        });
    }

    // The stored states times their lags, to a row of `to`.
    HWY_INLINE void write_states(const StateRef& to, std::int64_t row) {
        each_strip([&](const Strip& at) {
            if (s.lag[at.lag] != 1.0f) {
                scale_row(at.state, pk * strip_columns(), s.lag[at.lag]);
                make_operand<Dot>(at.state, pk, at.operand);
            }
            store_tile(tile(at), at.v0, at.columns, to, row, at.head, s.turn);
        });
        for (std::size_t i = 0; i < static_cast<std::size_t>(task.key_end - task.key_begin) * group; ++i)
            s.lag[i] = 1.0f;
    }

    HWY_INLINE void run_chunk(std::int64_t t, std::int64_t stop) {
        chunk.first = t;
        chunk.n = static_cast<std::size_t>(std::min<std::int64_t>(static_cast<std::int64_t>(C), stop - t));
        chunk.rows = (chunk.n + kTileRows - 1) / kTileRows * kTileRows;
        for (std::int32_t h = task.key_begin; h < task.key_end; ++h) {
            s.keys.load(call, task.span, t, chunk.n, chunk.rows, h);
            for (std::size_t r = 0; r < group; ++r) {
                const Strip first = strip(h, r, 0);
                chunk.head = first.head;
                s.lag[first.lag] = chunk.prepare(s.lag[first.lag]);
                chunk.load_values();
                RowsAhead ahead = rows_after(h, r);
                ahead.spread(strips * (pk / kTileRows));
                for (std::size_t p = 0; p < strips; ++p) {
                    const Strip at = strip(h, r, p);
                    chunk.run_strip(p, at.state, at.operand, ahead);
                }
                if (task.write_output) chunk.store_outputs();
            }
        }
    }

    // What follows the products of head (h, r): its outputs, the next head's values, and a share of the next key head's
    // keys and queries.
    HWY_INLINE RowsAhead rows_after(std::int32_t h, std::size_t r) const {
        const bool same_keys = r + 1 < group, wraps = h + 1 == task.key_end;
        const std::int32_t next_key = wraps ? task.key_begin : h + 1;
        const std::int64_t next_chunk = chunk.first + (wraps ? static_cast<std::int64_t>(chunk.n) : 0);
        RowsAhead ahead;
        const auto some = [&](const TokenRef& x, std::int64_t v, std::size_t columns, std::int32_t head,
                              std::int64_t begin, std::int64_t end) {
            ahead.add(x, task.span.batch, task.span.begin + begin, task.span.begin + std::min(end, task.span.length),
                      head, v, columns);
        };
        const auto share = [&](std::size_t i) { return next_chunk + static_cast<std::int64_t>(C * i / group); };
        if (task.write_output)
            some(call.o, static_cast<std::int64_t>(chunk.v_begin), chunk.v_columns,
                 call.value_head(h, static_cast<std::int32_t>(r)), chunk.first,
                 chunk.first + static_cast<std::int64_t>(chunk.n));
        some(call.k, 0, dim_k, next_key, share(r), share(r + 1));
        some(call.q, 0, dim_k, next_key, share(r), share(r + 1));
        if (task.transition) return ahead;
        const std::int32_t next_head = call.value_head(same_keys ? h : next_key, same_keys ? std::int32_t(r) + 1 : 0);
        const std::int64_t values = same_keys ? chunk.first : next_chunk;
        some(call.v, static_cast<std::int64_t>(chunk.v_begin), chunk.v_columns, next_head, values,
             values + std::int64_t(C));
        return ahead;
    }

    HWY_INLINE void run() {
        start();
        const CheckpointCursor cursor(call, task.sequence, task.first_token, task.checkpoint_row, task.write_output);
        const auto checkpoint = [&](std::int64_t row) { write_states(call.checkpoints, row); };
        for (std::int64_t t = 0; t < task.span.length; t += static_cast<std::int64_t>(chunk.n)) {
            cursor.visit(t, checkpoint);
            run_chunk(t, std::min(task.span.length, cursor.next_cut(t)));
        }
        if (task.last) cursor.visit(task.span.length, checkpoint);
        if (task.to == StateEnd::carry)
            write_states(carry_ref(task.carry_out), 0);
        else if (task.to == StateEnd::call && task.slots.write >= 0)
            write_states(call.final_state, task.slots.write);
    }
};

template <class Dot>
HWY_NOINLINE void forward_chunks(const ForwardTask& task, std::byte* scratch) {
    ForwardRun<Dot>(task, scratch).run();
}

void forward_task(const ForwardTask& task, std::byte* scratch) {
#if FQLA_HAVE_BF16_DOT
    if (task.shape.bf16_dot) return forward_chunks<PairDot>(task, scratch);
#endif
    forward_chunks<FloatDot>(task, scratch);
}

template <class Dot>
std::size_t forward_bytes(const Shape& shape) {
    ForwardScratch<Dot> s;
    Taker taker{nullptr};
    s.book(taker, shape);
    return taker.bytes();
}

std::size_t forward_scratch(const Shape& shape) {
#if FQLA_HAVE_BF16_DOT
    if (shape.bf16_dot) return forward_bytes<PairDot>(shape);
#endif
    return forward_bytes<FloatDot>(shape);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashqla::cpu
FQLA_END_TARGET

#endif  // toggled guard
