// Register tiles: the one matrix product that the chunked passes are made of. Compiled once per SIMD target.
//
// A tile is R = kTileRows accumulators x0, x1, ... of one vector each: R rows of a product, one strip of its columns. Its
// products take operand A by broadcast and operand B by vector,
//   x_i += sum_{r < depth} A(i, r) B[r, strip].
// A comes from a blocked matrix: element (t, k) of a [C tokens, K] matrix lies at  k / R * (C * R) + t * R + k % R.
// That one layout serves reductions over K, where rows are tokens, and reductions over tokens, where rows are K, always
// with constant offsets. A tile is one vector wide, so that a strip of the state (K x lanes: 8 KiB for K = 128 and 16
// lanes) stays in the first-level cache beside the chunk's keys and queries.

// NOTE: the guard toggles, see simd-inl.hpp.
#if defined(FQLA_CPU_TILE_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FQLA_CPU_TILE_INL_HPP_
#undef FQLA_CPU_TILE_INL_HPP_
#else
#define FQLA_CPU_TILE_INL_HPP_
#endif

#include "cpu/simd-inl.hpp"

// Rows of a register tile (a tile is that many vectors): 16 where there are 32 vector registers, 8 where there are 16.
// NOTE: SVE vectors are sizeless and cannot live in arrays, so tiles are written as named variables through these lists.
#undef FQLA_TILE_ROWS
#undef FQLA_EACH_ROW
#undef FQLA_EACH_HALF_ROW
#undef FQLA_EACH_PAIR
#undef FQLA_EACH_COUPLE
#if HWY_ARCH_ARM || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
#define FQLA_TILE_ROWS 16
#define FQLA_EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#define FQLA_EACH_HALF_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define FQLA_EACH_COUPLE(X) X(0, 1) X(2, 3) X(4, 5) X(6, 7) X(8, 9) X(10, 11) X(12, 13) X(14, 15)
#define FQLA_EACH_PAIR(X)                                                                                             \
    X(0, 1) X(0, 2) X(0, 3) X(0, 4) X(0, 5) X(0, 6) X(0, 7) X(0, 8) X(0, 9) X(0, 10) X(0, 11) X(0, 12) X(0, 13)       \
    X(0, 14) X(0, 15) X(1, 2) X(1, 3) X(1, 4) X(1, 5) X(1, 6) X(1, 7) X(1, 8) X(1, 9) X(1, 10) X(1, 11) X(1, 12)      \
    X(1, 13) X(1, 14) X(1, 15) X(2, 3) X(2, 4) X(2, 5) X(2, 6) X(2, 7) X(2, 8) X(2, 9) X(2, 10) X(2, 11) X(2, 12)     \
    X(2, 13) X(2, 14) X(2, 15) X(3, 4) X(3, 5) X(3, 6) X(3, 7) X(3, 8) X(3, 9) X(3, 10) X(3, 11) X(3, 12) X(3, 13)    \
    X(3, 14) X(3, 15) X(4, 5) X(4, 6) X(4, 7) X(4, 8) X(4, 9) X(4, 10) X(4, 11) X(4, 12) X(4, 13) X(4, 14) X(4, 15)   \
    X(5, 6) X(5, 7) X(5, 8) X(5, 9) X(5, 10) X(5, 11) X(5, 12) X(5, 13) X(5, 14) X(5, 15) X(6, 7) X(6, 8) X(6, 9)     \
    X(6, 10) X(6, 11) X(6, 12) X(6, 13) X(6, 14) X(6, 15) X(7, 8) X(7, 9) X(7, 10) X(7, 11) X(7, 12) X(7, 13)         \
    X(7, 14) X(7, 15) X(8, 9) X(8, 10) X(8, 11) X(8, 12) X(8, 13) X(8, 14) X(8, 15) X(9, 10) X(9, 11) X(9, 12)        \
    X(9, 13) X(9, 14) X(9, 15) X(10, 11) X(10, 12) X(10, 13) X(10, 14) X(10, 15) X(11, 12) X(11, 13) X(11, 14)        \
    X(11, 15) X(12, 13) X(12, 14) X(12, 15) X(13, 14) X(13, 15) X(14, 15)
#else
#define FQLA_TILE_ROWS 8
#define FQLA_EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define FQLA_EACH_HALF_ROW(X) X(0) X(1) X(2) X(3)
#define FQLA_EACH_COUPLE(X) X(0, 1) X(2, 3) X(4, 5) X(6, 7)
#define FQLA_EACH_PAIR(X)                                                                                             \
    X(0, 1) X(0, 2) X(0, 3) X(0, 4) X(0, 5) X(0, 6) X(0, 7) X(1, 2) X(1, 3) X(1, 4) X(1, 5) X(1, 6) X(1, 7) X(2, 3)   \
    X(2, 4) X(2, 5) X(2, 6) X(2, 7) X(3, 4) X(3, 5) X(3, 6) X(3, 7) X(4, 5) X(4, 6) X(4, 7) X(5, 6) X(5, 7) X(6, 7)
#endif

// The vectors x0, x1, ... exist by name in the function that uses the macros below.
#ifndef FQLA_TILE_ZERO
#define FQLA_TILE_ZERO_ROW(i) FloatVec x##i = hn::Zero(FloatTag());
#define FQLA_TILE_ZERO() FQLA_EACH_ROW(FQLA_TILE_ZERO_ROW)

// x_i += A(i) B for the pointers a, where rows lie kRowStep apart, and b.
#define FQLA_TILE_STEP_ROW(i) x##i = Dot::mul_add(Dot::broadcast(fqla_a + i * kRowStep), fqla_b, x##i);
#define FQLA_TILE_STEP(a, b)              \
    {                                     \
        const auto* fqla_a = (a);         \
        const auto fqla_b = Dot::load(b); \
        FQLA_EACH_ROW(FQLA_TILE_STEP_ROW) \
    }

// A reduction over K, R indices at a time: rows are tokens of a blocked matrix of c tokens.
#define FQLA_TILE_OVER_K(blocks, a, c, b, ldb)                                                   \
    {                                                                                            \
        constexpr std::size_t kRowStep = kTileRows;                                              \
        const auto* fqla_block = (a);                                                            \
        const auto* fqla_rows = (b);                                                             \
        for (std::size_t fqla_k = 0; fqla_k < (blocks); ++fqla_k, fqla_block += (c) * kTileRows) \
            for (std::size_t fqla_r = 0; fqla_r < kTileRows; ++fqla_r, fqla_rows += (ldb))       \
                FQLA_TILE_STEP(fqla_block + fqla_r, fqla_rows)                                   \
    }

// A reduction over tokens: rows are the R indices of one block.
#define FQLA_TILE_OVER_TOKENS(depth, a, b, ldb)                                                               \
    {                                                                                                         \
        constexpr std::size_t kRowStep = 1;                                                                   \
        const auto* fqla_token = (a);                                                                         \
        const auto* fqla_rows = (b);                                                                          \
        for (std::size_t fqla_r = 0; fqla_r < (depth); ++fqla_r, fqla_token += kTileRows, fqla_rows += (ldb)) \
            FQLA_TILE_STEP(fqla_token, fqla_rows)                                                             \
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
