// The chunked forward pass of one task. Compiled per target.
//
// For a chunk of C tokens with entering state S, running gate sums gamma, e = exp(gamma), Gamma_ij = exp(gamma_i -
// gamma_j), row norms folded into k^ = n_k k and q^ = scale n_q q (docs/math.md, "The chunk"):
//   U = K^ S                     X solves (I + L) X = beta (V - e U),    L = stril(beta Gamma K^ K^^T)
//   O = e (Q^ S) + P X           P = tril(Gamma Q^ K^^T)
//   S <- exp(gamma_C) S + K^^T (exp(gamma_C - gamma) X)
// No inverse is formed: substitution costs as much as multiplying by it, and is exact to fp32 for any keys.
//
// The state of a task is kept divided by a scalar `lag` (the decay not yet applied), so that most chunks add to it without
// a multiplication; the scalar is folded in when it falls below kSmallestLag.

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

FQLA_BEGIN_TARGET
namespace flashqla::cpu {
namespace HWY_NAMESPACE {

inline constexpr float kSmallestLag = 0x1p-20f;

// Scratch of a forward task.
template <class Dot>
struct ForwardScratch {
    using Element = typename Dot::Element;

    ChunkKeys<Dot> keys;
    ChunkGates gates;
    float* lower;      // [C,C] -L transposed: lower[j*C + i]
    float* upper;      // [C,C] P transposed
    float* from_u;     // [C] factor of U in the right-hand side
    float* from_o;     // [C] factor of Q S in the output
    float* to_state;   // [C] factor of X in the state update
    float* read;       // [2C, strip] K S and Q S
    float* values;     // [C, strip]
    float* x;          // [C, strip]
    Element* x_state;  // [C/depth, strip] X as operand of the state update
    float* turn;       // [strip, padded_k]
    float* lag;        // [group]
    float* state;      // [group, strips, padded_k, strip]
    Element* operand;  // the same as operand of K S and Q S; aliases `state` for float operands

    template <class Booker>
    void book(Booker& b, const Shape& s) {
        const std::size_t c = static_cast<std::size_t>(s.chunk), strip = strip_columns();
        const std::size_t pk = padded_rows(static_cast<std::size_t>(s.dim_k));
        const std::size_t tiles = static_cast<std::size_t>(s.group) * static_cast<std::size_t>(s.slice_strips);
        keys.book(b, c, pk);
        b.take(gates.high, c), b.take(gates.low, c), b.take(gates.decay, c), b.take(gates.rest, c);
        b.take(gates.beta, c);
        b.take(lower, c * c), b.take(upper, c * c);
        b.take(from_u, c), b.take(from_o, c), b.take(to_state, c);
        b.take(read, 2 * c * strip), b.take(values, c * strip), b.take(x, c * strip);
        b.take(x_state, c / Dot::kDepth * strip);
        b.take(turn, strip * pk);
        b.take(lag, static_cast<std::size_t>(s.group));
        b.take(state, tiles * pk * strip);
        if constexpr (Dot::kDepth == 1)
            operand = state;
        else
            b.take(operand, tiles * pk / Dot::kDepth * strip);
    }
};

// One tile of rows of the substitution: X[i0..] = u_factor U + beta V + sum_{j < i0} (-L) X, then the triangle in
// registers. All rows of `read`, `values`, `x` have strip_columns() floats.
HWY_INLINE void solve_tile(std::size_t i0, std::size_t c, const float* HWY_RESTRICT lower,
                           const float* HWY_RESTRICT u_factor, const float* HWY_RESTRICT beta,
                           const float* HWY_RESTRICT u, const float* HWY_RESTRICT v, float* HWY_RESTRICT x) {
    const FloatTag d;
    const std::size_t n = lanes(), ld = 2 * n;
    const float* a = lower + i0;
    u += i0 * ld, v += i0 * ld, u_factor += i0, beta += i0;
#define FQLA_ROW(i)                                                                                  \
    auto x##i = hn::Mul(hn::Set(d, beta[i]), hn::Load(d, v + i * ld));                               \
    auto y##i = hn::Mul(hn::Set(d, beta[i]), hn::Load(d, v + i * ld + n));                           \
    x##i = hn::MulAdd(hn::Set(d, u_factor[i]), hn::Load(d, u + i * ld), x##i);                       \
    y##i = hn::MulAdd(hn::Set(d, u_factor[i]), hn::Load(d, u + i * ld + n), y##i);
    FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
    const float* b = x;
    for (std::size_t j = 0; j < i0; ++j) {
        const auto b0 = hn::Load(d, b), b1 = hn::Load(d, b + n);
#define FQLA_ROW(i)                                 \
    x##i = hn::MulAdd(hn::Set(d, a[i]), b0, x##i);  \
    y##i = hn::MulAdd(hn::Set(d, a[i]), b1, y##i);
        FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
        a += c, b += ld;
    }
#define FQLA_PAIR(j, i)                                         \
    {                                                           \
        const auto s = hn::Set(d, a[j * c + i]);                \
        x##i = hn::MulAdd(s, x##j, x##i);                       \
        y##i = hn::MulAdd(s, y##j, y##i);                       \
    }
    FQLA_EACH_PAIR_BELOW(FQLA_PAIR)
#undef FQLA_PAIR
    x += i0 * ld;
#define FQLA_ROW(i)                   \
    hn::Store(x##i, d, x + i * ld);   \
    hn::Store(y##i, d, x + i * ld + n);
    FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
}

// One value head's view of a chunk.
template <class Dot>
struct HeadChunk {
    const ForwardTask& task;
    ForwardScratch<Dot>& s;
    std::size_t c, n, rows, pk;  // chunk capacity, tokens in it, tokens padded to tile rows, padded K

    // Small matrices and row factors for the lag at entry; returns the lag at exit. `rescale` receives the factor of the
    // stored state, 1 when it is left alone.
    HWY_INLINE float prepare(std::int64_t first, std::int32_t head, float lag, float& rescale) {
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
            const float* gram = s.keys.gram + j * 2 * c;  // [j, (k_i | q_i)]
            for (std::size_t i = j / lanes() * lanes(); i < rows; i += lanes()) {
                const auto gamma = hn::Mul(s.gates.between(i, j), nk);
                const auto row_k = hn::Mul(hn::Load(d, s.gates.beta + i), hn::Load(d, norm_k + i));
                const auto kk = hn::Mul(hn::Mul(gamma, row_k), hn::LoadU(d, gram + i));
                const auto kq = hn::Mul(hn::Mul(gamma, hn::Load(d, norm_q + i)), hn::LoadU(d, gram + c + i));
                hn::StoreU(hn::Neg(kk), d, s.lower + j * c + i);
                hn::StoreU(kq, d, s.upper + j * c + i);
            }
        }
        // A tile of rows reads P up to its last row, including the part above the diagonal.
        for (std::size_t j = 0; j < rows; ++j)
            for (std::size_t i = j / kTileRows * kTileRows; i < j / lanes() * lanes(); ++i) s.upper[j * c + i] = 0.0f;
        return fold ? 1.0f : entering;
    }

    // One strip of `columns` value columns from v0 on.
    HWY_INLINE void run_strip(std::int64_t first, std::int32_t head, std::size_t v0, std::size_t columns, float* state,
                              typename Dot::Element* operand, float rescale) {
        const std::size_t strip = strip_columns();
        const ForwardCall& call = *task.call;
        product<Dot, Into::set>(rows, strip, pk / Dot::kDepth, s.keys.turned, 2 * c, operand, strip, s.read, strip);
        if (task.write_output)
            product<Dot, Into::set>(rows, strip, pk / Dot::kDepth, s.keys.turned + c, 2 * c, operand, strip,
                                    s.read + c * strip, strip);
        load_values(first, head, v0, columns);
        for (std::size_t i0 = 0; i0 < rows; i0 += kTileRows)
            solve_tile(i0, c, s.lower, s.from_u, s.gates.beta, s.read, s.values, s.x);
        scale_deltas();
        if (task.write_output) {
            float* out = s.read + c * strip;
            for (std::size_t i0 = 0; i0 < rows; i0 += kTileRows)
                product_tile<FloatDot, 2, Into::scale_rows>(i0 + kTileRows, s.upper + i0, c, s.x, strip,
                                                            out + i0 * strip, strip, s.from_o + i0);
            for (std::size_t i = 0; i < n; ++i)
                store_row(out + i * strip, columns, call.o.data, call.o.dtype,
                          call.o.offset(task.span.batch, task.span.begin + first + std::int64_t(i), head) +
                              std::int64_t(v0));
        }
        const std::size_t depth = rows / Dot::kDepth;
        if (rescale == 1.0f)
            product<Dot, Into::add>(pk, strip, depth, s.keys.rows, pk, s.x_state, strip, state, strip);
        else
            product<Dot, Into::scale_all>(pk, strip, depth, s.keys.rows, pk, s.x_state, strip, state, strip, &rescale);
        make_operand<Dot>(state, pk, strip, operand);
    }

private:
    HWY_INLINE void load_values(std::int64_t first, std::int32_t head, std::size_t v0, std::size_t columns) {
        const std::size_t strip = strip_columns();
        const TokenRef& v = task.call->v;
        if (task.transition) return fill(s.values, rows * strip, 0.0f);
        for (std::size_t i = 0; i < rows; ++i) {
            float* row = s.values + i * strip;
            std::size_t used = 0;
            if (i < n) {
                load_row(v.data, v.dtype,
                         v.offset(task.span.batch, task.span.begin + first + std::int64_t(i), head) + std::int64_t(v0),
                         columns, row);
                used = columns;
            }
            for (std::size_t j = used; j < strip; ++j) row[j] = 0.0f;
        }
    }

    HWY_INLINE void scale_deltas() {
        const FloatTag d;
        const std::size_t strip = strip_columns(), l = lanes();
        if constexpr (Dot::kDepth == 1) {
            for (std::size_t i = 0; i < rows; ++i) {
                const auto f = hn::Set(d, s.to_state[i]);
                hn::Store(hn::Mul(f, hn::Load(d, s.x + i * strip)), d, s.x_state + i * strip);
                hn::Store(hn::Mul(f, hn::Load(d, s.x + i * strip + l)), d, s.x_state + i * strip + l);
            }
        } else {
            const WordTag du;
            for (std::size_t i = 0; i < rows; i += 2) {
                const auto f0 = hn::Set(d, s.to_state[i]), f1 = hn::Set(d, s.to_state[i + 1]);
                for (std::size_t j = 0; j < strip; j += l) {
                    const auto a = hn::Mul(f0, hn::Load(d, s.x + i * strip + j));
                    const auto b = hn::Mul(f1, hn::Load(d, s.x + (i + 1) * strip + j));
                    hn::StoreU(bf16_pair(a, b), du, s.x_state + i / 2 * strip + j);
                }
            }
        }
    }
};

template <class Dot>
HWY_NOINLINE void forward_chunks(const ForwardTask& task, std::byte* scratch) {
    const ForwardCall& call = *task.call;
    const Shape& shape = task.shape;
    ForwardScratch<Dot> s;
    Taker taker{scratch};
    s.book(taker, shape);

    const std::size_t c = static_cast<std::size_t>(shape.chunk), strip = strip_columns();
    const std::size_t dim_k = static_cast<std::size_t>(shape.dim_k), pk = padded_rows(dim_k);
    const std::size_t width = static_cast<std::size_t>(task.transition ? shape.dim_k : shape.dim_v);
    const auto begin = static_cast<std::size_t>(task.strip_begin), end = static_cast<std::size_t>(task.strip_end);
    const auto group = static_cast<std::size_t>(shape.group);
    const std::size_t tile = pk * strip, operand_tile = tile / Dot::kDepth;

    // Calls f(value head, its index in the group, first column, columns, state tile, operand tile) for every strip.
    const auto each_strip = [&](auto&& f) {
        for (std::size_t r = 0; r < group; ++r) {
            const std::int32_t head = call.value_head(task.key_head, static_cast<std::int32_t>(r));
            for (std::size_t p = begin; p < end; ++p) {
                const std::size_t at = r * static_cast<std::size_t>(shape.slice_strips) + (p - begin);
                const std::size_t v0 = p * strip;
                f(head, r, v0, std::min(strip, width - v0), s.state + at * tile, s.operand + at * operand_tile);
            }
        }
    };
    const auto tile_of = [&](float* data) { return Tile{data, strip, dim_k, pk}; };
    const auto carry_ref = [&](const float* p) {
        StateRef ref{const_cast<float*>(p), DType::f32, 1, 0, std::int64_t(dim_k * width), std::int64_t(width), 1, 0};
        return ref;
    };

    for (std::size_t r = 0; r < group; ++r) s.lag[r] = 1.0f;
    each_strip([&](std::int32_t head, std::size_t, std::size_t v0, std::size_t columns, float* state,
                   typename Dot::Element* operand) {
        if (task.from == StateEnd::call && task.slots.read >= 0) {
            load_tile(call.initial_state, task.slots.read, head, v0, columns, tile_of(state), s.turn);
        } else if (task.from == StateEnd::carry) {
            load_tile(carry_ref(task.carry_in), 0, head, v0, columns, tile_of(state), s.turn);
        } else {
            fill(state, tile, 0.0f);
            if (task.from == StateEnd::identity)
                for (std::size_t j = 0; j < columns; ++j) state[(v0 + j) * strip + j] = 1.0f;
        }
        make_operand<Dot>(state, pk, strip, operand);
    });

    // The stored state times its lag, written to a row of `to`.
    const auto write_states = [&](const StateRef& to, std::int64_t row) {
        each_strip([&](std::int32_t head, std::size_t r, std::size_t v0, std::size_t columns, float* state,
                       typename Dot::Element* operand) {
            if (s.lag[r] != 1.0f) {
                scale_row(state, tile, s.lag[r]);
                make_operand<Dot>(state, pk, strip, operand);
            }
            store_tile(tile_of(state), v0, columns, to, row, head, s.turn);
        });
        for (std::size_t r = 0; r < group; ++r) s.lag[r] = 1.0f;
    };

    HeadChunk<Dot> chunk{task, s, c, 0, 0, pk};
    CheckpointCursor cursor(call, task.sequence, task.first_token, task.checkpoint_row, task.write_output);
    for (std::int64_t t = 0; t < task.span.length;) {
        cursor.visit(t, [&](std::int64_t row) { write_states(call.checkpoints, row); });
        const std::int64_t stop = std::min(task.span.length, cursor.next_cut(t));
        chunk.n = static_cast<std::size_t>(std::min<std::int64_t>(static_cast<std::int64_t>(c), stop - t));
        chunk.rows = (chunk.n + kTileRows - 1) / kTileRows * kTileRows;
        s.keys.load(call, task.span, t, chunk.n, chunk.rows, task.key_head);
        for (std::size_t r = 0; r < group; ++r) {
            const std::int32_t head = call.value_head(task.key_head, static_cast<std::int32_t>(r));
            float rescale = 1.0f;
            s.lag[r] = chunk.prepare(t, head, s.lag[r], rescale);
            for (std::size_t p = begin; p < end; ++p) {
                const std::size_t at = r * static_cast<std::size_t>(shape.slice_strips) + (p - begin);
                const std::size_t v0 = p * strip;
                chunk.run_strip(t, head, v0, std::min(strip, width - v0), s.state + at * tile,
                                s.operand + at * operand_tile, rescale);
            }
        }
        t += static_cast<std::int64_t>(chunk.n);
    }
    if (task.last) cursor.visit(task.span.length, [&](std::int64_t row) { write_states(call.checkpoints, row); });

    if (task.to == StateEnd::carry) {
        write_states(carry_ref(task.carry_out), 0);
    } else if (task.to == StateEnd::call && task.slots.write >= 0) {
        write_states(call.final_state, task.slots.write);
    }
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
