// The matrix products of the backward pass, and the operand forms they take. Compiled per target.
//
// States and adjoints of states are kept transposed and in strips of two vectors of K, [K/strip, V, strip], as fp32
// sums: the rows of a plain [V, K] matrix lie a power of two apart, and a strip of it would find only a quarter of the
// first-level cache's sets. Products read them, and every other large operand, as Dot's elements: floats, which are the
// sums themselves, or pairs of bf16 in 32-bit words, which are written beside them. Which two numbers share a word
// depends on what a product reduces over, so a matrix may have two forms.

// NOTE: the guard toggles, see simd-inl.hpp.
#if defined(FQLA_CPU_BACKWARD_PRODUCTS_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FQLA_CPU_BACKWARD_PRODUCTS_INL_HPP_
#undef FQLA_CPU_BACKWARD_PRODUCTS_INL_HPP_
#else
#define FQLA_CPU_BACKWARD_PRODUCTS_INL_HPP_
#endif

#include "cpu/chunk-inl.hpp"
#include "cpu/simd-inl.hpp"
#include "cpu/tile-inl.hpp"

FQLA_BEGIN_TARGET
namespace flashqla::cpu {
namespace HWY_NAMESPACE {

// Tokens of a backward chunk: each chunk keeps a state in memory, so it is longer than the forward one.
inline constexpr std::size_t kBackwardChunk = 32;

// ---------------------------------------------------------------------------------------------- operand forms

// A [C, n] matrix blocked as operand A (tile-inl.hpp): rows are tokens in a reduction over channels, and channels in a
// reduction over tokens. Floats serve both from the same memory.
template <class Dot>
struct Blocked {
    using Element = typename Dot::Element;
    static constexpr std::size_t C = kBackwardChunk;
    Element* by_channel;  // [n/(R depth), C, R]
    Element* by_token;    // [n/R, C/depth, R]

    template <class Booker>
    void book(Booker& b, std::size_t n) {
        b.take(by_channel, C * n / Dot::kDepth);
        if constexpr (Dot::kDepth == 1)
            by_token = by_channel;
        else
            b.take(by_token, C * n / Dot::kDepth);
    }

    // The matrix from channel n on; n in whole blocks.
    HWY_INLINE Blocked from_channel(std::size_t n) const {
        return {by_channel + n * (C / Dot::kDepth), by_token + n * (C / Dot::kDepth)};
    }

    // Both forms of n channels of the rows of x, ld apart, times `factor` (null: 1), for a product of each kind.
    HWY_INLINE void fill(const float* x, std::size_t ld, const float* factor, std::size_t n, std::size_t tokens) const {
        fill_by_channel(x, ld, factor, n, tokens);
        if constexpr (Dot::kDepth == 2) fill_by_token(x, ld, factor, n, tokens);
    }

    HWY_INLINE void fill_by_channel(const float* x, std::size_t ld, const float* factor, std::size_t n,
                                    std::size_t tokens) const {
        if constexpr (Dot::kDepth == 1) {
            const hn::CappedTag<float, kTileRows> d;
            for (std::size_t t = 0; t < tokens; ++t, x += ld) {
                const auto f = hn::Set(d, factor ? factor[t] : 1.0f);
                float* to = by_channel + t * kTileRows;
                for (std::size_t v = 0; v < n; v += kTileRows, to += C * kTileRows)
                    for (std::size_t r = 0; r < kTileRows; r += hn::Lanes(d))
                        hn::StoreU(hn::Mul(f, hn::LoadU(d, x + v + r)), d, to + r);
            }
        } else {
            const FloatTag d;
            for (std::size_t t = 0; t < tokens; ++t, x += ld) {
                const auto f = hn::Set(d, factor ? factor[t] : 1.0f);
                Element* to = by_channel + t * kTileRows;
                for (std::size_t v = 0; v < n; v += 2 * lanes(), to += 2 * C * kTileRows)
                    store_halves(bf16_words(hn::Mul(f, hn::Load(d, x + v)), hn::Mul(f, hn::Load(d, x + v + lanes()))),
                                 to, to + C * kTileRows);
            }
        }
    }

    HWY_INLINE void fill_by_token(const float* x, std::size_t ld, const float* factor, std::size_t n,
                                  std::size_t tokens) const {
        if constexpr (Dot::kDepth == 1) {
            fill_by_channel(x, ld, factor, n, tokens);
        } else {
            const FloatTag d;
            constexpr std::size_t kBlock = C / 2 * kTileRows;
            for (std::size_t t = 0; t < tokens; t += 2, x += 2 * ld) {
                const auto f = hn::Set(d, factor ? factor[t] : 1.0f), f1 = hn::Set(d, factor ? factor[t + 1] : 1.0f);
                Element* to = by_token + t / 2 * kTileRows;
                for (std::size_t v = 0; v < n; v += lanes(), to += 2 * kBlock)
                    store_halves(bf16_pair(hn::Mul(f, hn::Load(d, x + v)), hn::Mul(f1, hn::Load(d, x + ld + v))), to,
                                 to + kBlock);
            }
        }
    }

    // What rounding to pairs took from by_token, as an operand like it.
    HWY_INLINE void fill_residual(const float* x, std::size_t ld, const float* factor, std::size_t n,
                                  std::size_t tokens, Element* to) const {
        const FloatTag d;
        constexpr std::size_t kBlock = C / 2 * kTileRows;
        for (std::size_t t = 0; t < tokens; t += 2, x += 2 * ld) {
            const auto f = hn::Set(d, factor[t]), f1 = hn::Set(d, factor[t + 1]);
            Element* row = to + t / 2 * kTileRows;
            for (std::size_t v = 0; v < n; v += lanes(), row += 2 * kBlock)
                store_halves(bf16_residual(hn::Mul(f, hn::Load(d, x + v)), hn::Mul(f1, hn::Load(d, x + ld + v))), row,
                             row + kBlock);
        }
    }

    // [n/depth, ld]: operand B of a reduction over channels.
    HWY_INLINE void turn(std::size_t n, std::size_t tokens, Element* to, std::size_t ld) const {
        for (std::size_t k = 0; k < n / Dot::kDepth; k += kTileRows)
            transpose(by_channel + k * C, kTileRows, tokens, kTileRows, to + k * ld, ld);
    }
};

// Rows of x times `factor` (null: 1) as operand B of a reduction over tokens: [C/depth, n].
template <class Dot>
HWY_INLINE void rows_by_token(const float* x, const float* factor, std::size_t n, std::size_t tokens,
                              typename Dot::Element* to) {
    const FloatTag d;
    for (std::size_t t = 0; t < tokens; t += Dot::kDepth, x += Dot::kDepth * n, to += n) {
        const auto f = hn::Set(d, factor ? factor[t] : 1.0f);
        if constexpr (Dot::kDepth == 1) {
            for (std::size_t v = 0; v < n; v += lanes()) hn::Store(hn::Mul(f, hn::Load(d, x + v)), d, to + v);
        } else {
            const auto f1 = hn::Set(d, factor ? factor[t + 1] : 1.0f);
            for (std::size_t v = 0; v < n; v += lanes())
                hn::Store(bf16_pair(hn::Mul(f, hn::Load(d, x + v)), hn::Mul(f1, hn::Load(d, x + n + v))), WordTag(),
                          to + v);
        }
    }
}

// A state, transposed, in all the forms that products read. With floats all three are the same memory.
template <class Dot>
struct StateForms {
    using Element = typename Dot::Element;
    float* sum;         // [K/strip, V, strip]
    Element* by_key;    // [K/strip, V, strip/depth]: operand A of reductions over K
    Element* by_value;  // [K/strip, V/depth, strip]: operand B of reductions over V; null where nothing reads it

    // The other forms from the sums.
    HWY_INLINE void refresh(std::size_t vc, std::size_t kc) const {
        if constexpr (Dot::kDepth == 2) {
            const FloatTag d;
            if (by_value) rows_by_token<Dot>(sum, nullptr, strip_columns(), vc * kc / strip_columns(), by_value);
            for (std::size_t i = 0; i < vc * kc; i += 2 * lanes())
                hn::Store(bf16_words(hn::Load(d, sum + i), hn::Load(d, sum + i + lanes())), WordTag(), by_key + i / 2);
        }
    }
};

// ---------------------------------------------------------------------------------------------- products

// A reduction over r in [begin, end) with a row-major A of fp32: A(i,r) at a + i * lda + r, or at a + i + r * lda when
// it is turned.
#ifndef FQLA_TILE_OVER_ROWS
#define FQLA_TILE_OVER_ROWS(begin, end, a, lda, b, ldb, second)        \
    {                                                                  \
        const std::size_t kRowStep = (lda);                            \
        for (std::size_t fqla_r = (begin); fqla_r < (end); ++fqla_r)   \
            FQLA_TILE_STEP((a) + fqla_r, (b) + fqla_r * (ldb), second) \
    }
#define FQLA_TILE_OVER_TURNED(begin, end, a, lda, b, ldb, second)              \
    {                                                                          \
        constexpr std::size_t kRowStep = 1;                                    \
        for (std::size_t fqla_r = (begin); fqla_r < (end); ++fqla_r)           \
            FQLA_TILE_STEP((a) + fqla_r * (lda), (b) + fqla_r * (ldb), second) \
    }
// Rows of a tile from and to memory.
#define FQLA_TILE_ADD_ROW(r)                                  \
    x##r = hn::Add(x##r, hn::Load(d, fqla_to + r * fqla_ld)); \
    y##r = hn::Add(y##r, hn::Load(d, fqla_to + r * fqla_ld + lanes()));
#define FQLA_TILE_STORE_ROW(r)                 \
    hn::Store(x##r, d, fqla_to + r * fqla_ld); \
    hn::Store(y##r, d, fqla_to + r * fqla_ld + lanes());
#define FQLA_TILE_LOAD_ROW(r)                                  \
    FloatVec x##r = hn::Load(d, fqla_from + r * fqla_from_ld), \
             y##r = hn::Load(d, fqla_from + r * fqla_from_ld + lanes());
#define FQLA_TILE_LOAD(from, ld)           \
    const float* const fqla_from = (from); \
    const std::size_t fqla_from_ld = (ld); \
    FQLA_EACH_ROW(FQLA_TILE_LOAD_ROW)
#define FQLA_TILE_STORE(to, ld)            \
    {                                      \
        float* fqla_to = (to);             \
        const std::size_t fqla_ld = (ld);  \
        FQLA_EACH_ROW(FQLA_TILE_STORE_ROW) \
    }
#define FQLA_TILE_ADD_TO(to, ld)           \
    {                                      \
        float* fqla_to = (to);             \
        const std::size_t fqla_ld = (ld);  \
        FQLA_EACH_ROW(FQLA_TILE_ADD_ROW)   \
        FQLA_EACH_ROW(FQLA_TILE_STORE_ROW) \
    }
#endif

// Rows [v, v + n) of (K S)^T or (K D)^T: C[n, C] = state [V, K] . keys [K/depth, C].
template <class Dot>
HWY_NOINLINE void read_state(std::size_t v, std::size_t n, std::size_t vc, std::size_t kc, std::size_t tokens,
                             const typename Dot::Element* by_key, const typename Dot::Element* keys_turned, float* to,
                             RowsAhead& ahead) {
    const FloatTag d;
    const std::size_t l = lanes(), depth = 2 * l / Dot::kDepth, strips = kc / (2 * l);
    for (std::size_t j = 0; j < tokens; j += 2 * l)
        for (std::size_t i = 0; i < n; i += kTileRows) {
            ahead.step(kc / Dot::kDepth);
            FQLA_TILE_ZERO()
            const typename Dot::Element *a = by_key + (v + i) * depth, *b = keys_turned + j;
            for (std::size_t p = 0; p < strips; ++p, a += vc * depth, b += depth * kBackwardChunk)
                FQLA_TILE_OVER_ROWS(0, depth, a, depth, b, kBackwardChunk, l)
            FQLA_TILE_STORE(to + i * kBackwardChunk + j, kBackwardChunk)
        }
}

// X solves (I + L) X = W in place, in `columns` columns at x of a [C, V] matrix; l_turned is L at [j, i]: earlier tiles
// of rows by products, the tile's own triangle in registers.
inline HWY_NOINLINE void substitute(const float* l_turned, float* x, std::size_t vc, std::size_t columns,
                                    std::size_t rows) {
    constexpr std::size_t C = kBackwardChunk;
    const FloatTag d;
    const std::size_t l = lanes();
    for (const float* end = x + columns; x < end; x += 2 * l)
        for (std::size_t i = 0; i < rows; i += kTileRows) {
            float* tile = x + i * vc;
            const float* lower = l_turned + i;
            FQLA_TILE_LOAD(tile, vc)
            for (std::size_t j = 0; j < i; ++j, lower += C) {
                const auto b0 = hn::Load(d, x + j * vc), b1 = hn::Load(d, x + j * vc + l);
#define FQLA_ROW(r)                                       \
    x##r = hn::NegMulAdd(hn::Set(d, lower[r]), b0, x##r); \
    y##r = hn::NegMulAdd(hn::Set(d, lower[r]), b1, y##r);
                FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
            }
#define FQLA_PAIR(j, i)                                             \
    x##i = hn::NegMulAdd(hn::Set(d, lower[j * C + i]), x##j, x##i); \
    y##i = hn::NegMulAdd(hn::Set(d, lower[j * C + i]), y##j, y##i);
            FQLA_EACH_PAIR(FQLA_PAIR)
#undef FQLA_PAIR
            FQLA_TILE_STORE(tile, vc)
        }
}

// W' solves (I + L)^T W' = X' in place, from the last row up.
inline HWY_NOINLINE void substitute_back(const float* l_turned, float* w, std::size_t vc, std::size_t columns,
                                         std::size_t rows) {
    constexpr std::size_t C = kBackwardChunk;
    const FloatTag d;
    const std::size_t l = lanes();
    for (const float* end = w + columns; w < end; w += 2 * l)
        for (std::size_t j = rows; j > 0;) {
            j -= kTileRows;
            float* tile = w + j * vc;
            const float* lower = l_turned + j * C;
            FQLA_TILE_LOAD(tile, vc)
            for (std::size_t i = j + kTileRows; i < rows; ++i) {
                const auto b0 = hn::Load(d, w + i * vc), b1 = hn::Load(d, w + i * vc + l);
#define FQLA_ROW(r)                                               \
    x##r = hn::NegMulAdd(hn::Set(d, lower[r * C + i]), b0, x##r); \
    y##r = hn::NegMulAdd(hn::Set(d, lower[r * C + i]), b1, y##r);
                FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
            }
            lower += j;
#define FQLA_PAIR(j, i)                                             \
    x##j = hn::NegMulAdd(hn::Set(d, lower[j * C + i]), x##i, x##j); \
    y##j = hn::NegMulAdd(hn::Set(d, lower[j * C + i]), y##i, y##j);
            FQLA_EACH_PAIR_BACK(FQLA_PAIR)
#undef FQLA_PAIR
            FQLA_TILE_STORE(tile, vc)
        }
}

// <x_j, y_i> and <x_j, z_i> of [C, n] matrices at [j, i], in whole vectors from the diagonal on. x is blocked by
// channel; y and z are turned, [n, C], with rows ld apart, z `second` elements after y.
inline HWY_NOINLINE void products_of_rows(std::size_t n, std::size_t rows, const float* x, const float* y,
                                          std::size_t ld, std::size_t second, float* with_y, float* with_z) {
    using Dot = FloatDot;
    constexpr std::size_t C = kBackwardChunk;
    const FloatTag d;
    for (std::size_t j = 0; j < rows; j += kTileRows)
        for (std::size_t i = j / lanes() * lanes(); i < rows; i += lanes()) {
            FQLA_TILE_ZERO()
            FQLA_TILE_OVER_K(n / kTileRows, x + j * kTileRows, C, y + i, ld, second)
#define FQLA_ROW(r)                                \
    hn::StoreU(x##r, d, with_y + (j + r) * C + i); \
    hn::StoreU(y##r, d, with_z + (j + r) * C + i);
            FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
        }
}

// A term X^T Y of a state's update.
template <class Dot>
struct Term {
    const typename Dot::Element* x;  // [C, V] blocked by token
    const typename Dot::Element* y;  // [C/depth, K]
};

// Strip p of: to = factor from + sum of `count` terms over `tokens` tokens, in all forms.
template <class Dot>
HWY_NOINLINE void update_state(std::size_t p, std::size_t vc, std::size_t kc, std::size_t tokens, float factor,
                               const float* from, const Term<Dot>* terms, std::size_t count, const StateForms<Dot>& to,
                               RowsAhead& ahead) {
    const FloatTag d;
    const std::size_t l = lanes(), depth = tokens / Dot::kDepth;
    const auto scale = hn::Set(d, factor);
    for (std::size_t v = 0; v < vc; v += kTileRows) {
        ahead.step(depth * count);
        const std::size_t at = (p * vc + v) * (2 * l);
        const float* start = from + at;
#define FQLA_ROW(r)                                             \
    auto x##r = hn::Mul(scale, hn::Load(d, start + r * 2 * l)); \
    auto y##r = hn::Mul(scale, hn::Load(d, start + r * 2 * l + l));
        FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
        for (std::size_t i = 0; i < count; ++i)
            FQLA_TILE_OVER_TOKENS(depth, terms[i].x + v * (kBackwardChunk / Dot::kDepth), terms[i].y + p * 2 * l, kc, l)
        FQLA_TILE_STORE(to.sum + at, 2 * l)
        if constexpr (Dot::kDepth == 2) {
            if (to.by_value) {
                std::uint32_t* pairs = to.by_value + at / 2;
#define FQLA_COUPLE(a, b)                                       \
    hn::Store(bf16_pair(x##a, x##b), WordTag(), pairs + a * l); \
    hn::Store(bf16_pair(y##a, y##b), WordTag(), pairs + a * l + l);
                FQLA_EACH_COUPLE(FQLA_COUPLE)
#undef FQLA_COUPLE
            }
            std::uint32_t* words = to.by_key + at / 2;
#define FQLA_ROW(r) hn::Store(bf16_words(x##r, y##r), WordTag(), words + r * l);
            FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
        }
    }
}

// The part of <D, S> in one strip of each, in double beyond a tile's rows: it is the longest sum of the pass. Pairs
// also leave the strip of S by value, [V/2, strip].
template <class Dot>
HWY_NOINLINE double dot_strips(std::size_t vc, const float* adjoint, const float* state,
                               typename Dot::Element* state_by_value) {
    const FloatTag d;
    const std::size_t l = lanes(), strip = 2 * l;
    double sum = 0.0;
    for (std::size_t v = 0; v < vc; v += kTileRows) {
        auto even = hn::Zero(d), odd = hn::Zero(d);
        for (std::size_t row = v; row < v + kTileRows; row += 2)
            for (std::size_t at = row * strip; at < row * strip + strip; at += l) {
                const auto x = hn::Load(d, state + at), y = hn::Load(d, state + at + strip);
                even = hn::MulAdd(x, hn::Load(d, adjoint + at), even);
                odd = hn::MulAdd(y, hn::Load(d, adjoint + at + strip), odd);
                if constexpr (Dot::kDepth == 2)
                    hn::Store(bf16_pair(x, y), WordTag(), state_by_value + at - row / 2 * strip);
            }
        sum += hn::GetLane(hn::SumOfLanes(d, hn::Add(even, odd)));
    }
    return sum;
}

}  // namespace HWY_NAMESPACE
}  // namespace flashqla::cpu
FQLA_END_TARGET

#endif  // toggled guard
