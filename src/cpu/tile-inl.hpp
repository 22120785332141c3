// Register tiles: the one matrix product that the chunked passes are made of. Compiled once per SIMD target.
//
// A tile is R = kTileRows rows of two vectors each, x0 y0, x1 y1, ...: R rows of a product, one strip of its columns.
// Its products take operand A by broadcast and operand B by vector,
//   (x_i y_i) += sum_{r < depth} A(i, r) B[r, strip].
// A comes from a blocked matrix: element (t, k) of a [C tokens, K] matrix lies at  k / R * (C * R) + t * R + k % R.
// That one layout serves reductions over K, where rows are tokens, and reductions over tokens, where rows are K, always
// with constant offsets. Two vectors make ten loads for sixteen multiplications; one vector and twice the rows would
// make seventeen, which binds on Zen 4.

// NOTE: the guard toggles, see simd-inl.hpp.
#if defined(FQLA_CPU_TILE_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FQLA_CPU_TILE_INL_HPP_
#undef FQLA_CPU_TILE_INL_HPP_
#else
#define FQLA_CPU_TILE_INL_HPP_
#endif

#include "cpu/simd-inl.hpp"

// Rows of a register tile: 8 where there are 32 vector registers, 4 where there are 16.
// NOTE: SVE vectors are sizeless and cannot live in arrays, so tiles are written as named variables through these
// lists: every row, every couple of rows, every pair j < i with j outermost and rising, or with i outermost and
// falling.
// clang-format off
#undef FQLA_TILE_ROWS
#undef FQLA_EACH_ROW
#undef FQLA_EACH_COUPLE
#undef FQLA_EACH_PAIR
#undef FQLA_EACH_PAIR_BACK
#if HWY_ARCH_ARM || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
#define FQLA_TILE_ROWS 8
#define FQLA_EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define FQLA_EACH_COUPLE(X) X(0, 1) X(2, 3) X(4, 5) X(6, 7)
#define FQLA_EACH_PAIR(X)                                   \
    X(0, 1) X(0, 2) X(0, 3) X(0, 4) X(0, 5) X(0, 6) X(0, 7) \
    X(1, 2) X(1, 3) X(1, 4) X(1, 5) X(1, 6) X(1, 7)         \
    X(2, 3) X(2, 4) X(2, 5) X(2, 6) X(2, 7)                 \
    X(3, 4) X(3, 5) X(3, 6) X(3, 7)                         \
    X(4, 5) X(4, 6) X(4, 7)                                 \
    X(5, 6) X(5, 7)                                         \
    X(6, 7)
#define FQLA_EACH_PAIR_BACK(X)                              \
    X(6, 7) X(5, 7) X(4, 7) X(3, 7) X(2, 7) X(1, 7) X(0, 7) \
    X(5, 6) X(4, 6) X(3, 6) X(2, 6) X(1, 6) X(0, 6)         \
    X(4, 5) X(3, 5) X(2, 5) X(1, 5) X(0, 5)                 \
    X(3, 4) X(2, 4) X(1, 4) X(0, 4)                         \
    X(2, 3) X(1, 3) X(0, 3)                                 \
    X(1, 2) X(0, 2)                                         \
    X(0, 1)
#else
#define FQLA_TILE_ROWS 4
#define FQLA_EACH_ROW(X) X(0) X(1) X(2) X(3)
#define FQLA_EACH_COUPLE(X) X(0, 1) X(2, 3)
#define FQLA_EACH_PAIR(X) X(0, 1) X(0, 2) X(0, 3) X(1, 2) X(1, 3) X(2, 3)
#define FQLA_EACH_PAIR_BACK(X) X(2, 3) X(1, 3) X(0, 3) X(1, 2) X(0, 2) X(0, 1)
#endif
// clang-format on

// The vectors x0 y0, x1 y1, ... exist by name in the function that uses the macros below.
#ifndef FQLA_TILE_ZERO
#define FQLA_TILE_ZERO_ROW(i) FloatVec x##i = hn::Zero(FloatTag()), y##i = hn::Zero(FloatTag());
#define FQLA_TILE_ZERO() FQLA_EACH_ROW(FQLA_TILE_ZERO_ROW)

// Two vectors of B, `second` elements apart, against R elements of A, kRowStep apart.
#define FQLA_TILE_STEP_ROW(i)                                      \
    {                                                              \
        const auto fqla_s = Dot::broadcast(fqla_a + i * kRowStep); \
        x##i = Dot::mul_add(fqla_s, fqla_b0, x##i);                \
        y##i = Dot::mul_add(fqla_s, fqla_b1, y##i);                \
    }
#define FQLA_TILE_STEP(a, b, second)                    \
    {                                                   \
        const auto* fqla_a = (a);                       \
        const auto fqla_b0 = Dot::load(b);              \
        const auto fqla_b1 = Dot::load((b) + (second)); \
        FQLA_EACH_ROW(FQLA_TILE_STEP_ROW)               \
    }

// A reduction over K, R indices at a time: rows are tokens of a blocked matrix of c tokens.
#define FQLA_TILE_OVER_K(blocks, a, c, b, ldb, second)                                         \
    {                                                                                          \
        constexpr std::size_t kRowStep = kTileRows;                                            \
        const auto* fqla_block = (a);                                                          \
        const auto* fqla_rows = (b);                                                           \
        for (std::size_t fqla_k = 0; fqla_k < (blocks); ++fqla_k, fqla_block += (c)*kTileRows) \
            for (std::size_t fqla_r = 0; fqla_r < kTileRows; ++fqla_r, fqla_rows += (ldb))     \
                FQLA_TILE_STEP(fqla_block + fqla_r, fqla_rows, second)                         \
    }

// A reduction over tokens: rows are the R indices of one block.
#define FQLA_TILE_OVER_TOKENS(depth, a, b, ldb, second)                                                       \
    {                                                                                                         \
        constexpr std::size_t kRowStep = 1;                                                                   \
        const auto* fqla_token = (a);                                                                         \
        const auto* fqla_rows = (b);                                                                          \
        for (std::size_t fqla_r = 0; fqla_r < (depth); ++fqla_r, fqla_token += kTileRows, fqla_rows += (ldb)) \
            FQLA_TILE_STEP(fqla_token, fqla_rows, second)                                                     \
    }
#endif

FQLA_BEGIN_TARGET
namespace flashqla::cpu {
namespace HWY_NAMESPACE {

inline constexpr std::size_t kTileRows = FQLA_TILE_ROWS;

}  // namespace HWY_NAMESPACE
}  // namespace flashqla::cpu
FQLA_END_TARGET

#endif  // toggled guard
