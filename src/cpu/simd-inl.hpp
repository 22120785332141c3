// SIMD vocabulary of the CPU backend: conversions between dtypes, transposes, and one step of a dot product. Compiled
// once per SIMD target.

// NOTE: Highway includes this file once per target; the guard toggles so that each target sees it exactly once.
#if defined(FQLA_CPU_SIMD_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FQLA_CPU_SIMD_INL_HPP_
#undef FQLA_CPU_SIMD_INL_HPP_
#else
#define FQLA_CPU_SIMD_INL_HPP_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/call.hpp"
#include "base/float16.hpp"
#include "flashqla/flashqla.hpp"
#include "hwy/highway.h"

// Highway's AVX3_DL target serves as AVX-512-BF16 here: one instruction set extension more, and dispatch.cpp offers it
// only on processors that have it.
#undef FQLA_BEGIN_TARGET
#undef FQLA_END_TARGET
#undef FQLA_HAVE_BF16_DOT
#if HWY_TARGET == HWY_AVX3_DL
#define FQLA_HAVE_BF16_DOT 1
#define FQLA_BEGIN_TARGET   \
    HWY_BEFORE_NAMESPACE(); \
    HWY_PUSH_ATTRIBUTES("avx512bf16")
#define FQLA_END_TARGET HWY_POP_ATTRIBUTES HWY_AFTER_NAMESPACE();
#else
#define FQLA_HAVE_BF16_DOT 0
#define FQLA_BEGIN_TARGET HWY_BEFORE_NAMESPACE();
#define FQLA_END_TARGET HWY_AFTER_NAMESPACE();
#endif

FQLA_BEGIN_TARGET
namespace flashqla::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::CappedTag<float, 16>;
using FloatVec = hn::Vec<FloatTag>;
using WordTag = hn::RebindToUnsigned<FloatTag>;

HWY_INLINE std::size_t lanes() { return hn::Lanes(FloatTag()); }
HWY_INLINE std::size_t strip_columns() { return 2 * lanes(); }  // value columns of a register tile

// ---------------------------------------------------------------------------------------------- conversions

// Round to nearest even; the result sits in the low half of each word. NaN stays NaN.
HWY_INLINE hn::Vec<WordTag> bf16_bits(FloatVec x) {
    const WordTag du;
    const auto bits = hn::BitCast(du, x);
    const auto lsb = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(lsb, hn::Set(du, 0x7fff))));
    const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x40));
    return hn::IfThenElse(hn::RebindMask(du, hn::Ne(x, x)), quiet, rounded);
}

// n elements of any float dtype to floats.
HWY_INLINE void load_row(const void* source, DType dtype, std::int64_t offset, std::size_t n, float* HWY_RESTRICT to) {
    const FloatTag d;
    const std::size_t step = lanes();
    std::size_t i = 0;
    if (dtype == DType::f32) {
        const float* from = static_cast<const float*>(source) + offset;
        for (; i + step <= n; i += step) hn::StoreU(hn::LoadU(d, from + i), d, to + i);
    } else if (dtype == DType::bf16) {
        const hn::Rebind<std::uint16_t, FloatTag> d16;
        const auto* from = static_cast<const std::uint16_t*>(source) + offset;
        for (; i + step <= n; i += step) {
            const auto words = hn::PromoteTo(WordTag(), hn::LoadU(d16, from + i));
            hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(words)), d, to + i);
        }
    } else {
        const hn::Rebind<hwy::float16_t, FloatTag> d16;
        const auto* from = reinterpret_cast<const hwy::float16_t*>(static_cast<const std::uint16_t*>(source) + offset);
        for (; i + step <= n; i += step) hn::StoreU(hn::PromoteTo(d, hn::LoadU(d16, from + i)), d, to + i);
    }
    for (; i < n; ++i) to[i] = load_float(source, dtype, offset + static_cast<std::int64_t>(i));
}

// n floats to any float dtype.
HWY_INLINE void store_row(const float* HWY_RESTRICT from, std::size_t n, void* target, DType dtype,
                          std::int64_t offset) {
    const FloatTag d;
    const std::size_t step = lanes();
    std::size_t i = 0;
    if (dtype == DType::f32) {
        float* to = static_cast<float*>(target) + offset;
        for (; i + step <= n; i += step) hn::StoreU(hn::LoadU(d, from + i), d, to + i);
    } else if (dtype == DType::bf16) {
        const hn::Rebind<std::uint16_t, FloatTag> d16;
        const hn::RebindToSigned<FloatTag> di;
        auto* to = static_cast<std::uint16_t*>(target) + offset;
        for (; i + step <= n; i += step) {
            const auto bits = bf16_bits(hn::LoadU(d, from + i));
            hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, bits)), d16, to + i);
        }
    }
    for (; i < n; ++i) store_float(target, dtype, offset + static_cast<std::int64_t>(i), from[i]);
}

// Asks for one cache line ahead of use.
HWY_INLINE void prefetch_line(const TokenRef& x, std::int64_t offset, std::size_t line) {
    const auto* p = static_cast<const std::byte*>(x.data) + offset * static_cast<std::int64_t>(size_of(x.dtype));
    __builtin_prefetch(p + line * 64);
}

HWY_INLINE std::size_t lines_of(const TokenRef& x, std::size_t n) { return (n * size_of(x.dtype) + 63) / 64; }

HWY_INLINE void fill(float* to, std::size_t n, float value) {
    for (std::size_t i = 0; i < n; ++i) to[i] = value;
}

#if HWY_TARGET != HWY_SCALAR
// A vector of blocks of four elements, `step` elements apart.
template <class D, class T>
HWY_INLINE hn::Vec<D> load_blocks(D d, const T* from, std::size_t step) {
    if constexpr (hn::MaxLanes(d) <= 4) {
        return hn::LoadU(d, from);
    } else {
        const hn::Half<D> half;
        return hn::Combine(d, load_blocks(half, from + hn::MaxLanes(half) / 4 * step, step),
                           load_blocks(half, from, step));
    }
}

// A transpose of as many rows as d has lanes. NOTE: the blocks of a vector are rows four apart, so that two steps of
// interleaving inside blocks leave whole columns.
template <class D, class T>
HWY_INLINE void transpose_rows(D d, const T* from, std::size_t from_stride, std::size_t columns, T* to,
                               std::size_t to_stride) {
    const hn::Repartition<std::uint64_t, D> d64;
    for (std::size_t c = 0; c < columns; c += 4, from += 4, to += 4 * to_stride) {
        const auto r0 = load_blocks(d, from, 4 * from_stride), r1 = load_blocks(d, from + from_stride, 4 * from_stride);
        const auto r2 = load_blocks(d, from + 2 * from_stride, 4 * from_stride);
        const auto r3 = load_blocks(d, from + 3 * from_stride, 4 * from_stride);
        const auto a = hn::BitCast(d64, hn::InterleaveLower(d, r0, r1));  // r0[0] r1[0] r0[1] r1[1]
        const auto b = hn::BitCast(d64, hn::InterleaveLower(d, r2, r3));
        const auto e = hn::BitCast(d64, hn::InterleaveUpper(d, r0, r1));
        const auto g = hn::BitCast(d64, hn::InterleaveUpper(d, r2, r3));
        hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, a, b)), d, to);
        hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d64, a, b)), d, to + to_stride);
        hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, e, g)), d, to + 2 * to_stride);
        hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d64, e, g)), d, to + 3 * to_stride);
    }
}
#endif

// to[c * to_stride + r] = from[r * from_stride + c] for 32-bit elements; rows and columns are multiples of 4.
template <class T>
HWY_INLINE void transpose(const T* from, std::size_t from_stride, std::size_t rows, std::size_t columns, T* to,
                          std::size_t to_stride) {
    static_assert(sizeof(T) == 4);
#if HWY_TARGET == HWY_SCALAR
    for (std::size_t r = 0; r < rows; ++r)
        for (std::size_t c = 0; c < columns; ++c) to[c * to_stride + r] = from[r * from_stride + c];
#else
    std::size_t r = 0;
#if !HWY_HAVE_SCALABLE
    const hn::Rebind<T, FloatTag> wide;
    for (; r + hn::MaxLanes(wide) <= rows; r += hn::MaxLanes(wide))
        transpose_rows(wide, from + r * from_stride, from_stride, columns, to + r, to_stride);
#endif
    for (; r < rows; r += 4)
        transpose_rows(hn::FixedTag<T, 4>(), from + r * from_stride, from_stride, columns, to + r, to_stride);
#endif
}

// -------------------------------------------------------------------------------------------- dot products

// One step of a reduction: float operands, one index at a time.
struct FloatDot {
    using Element = float;
    static constexpr std::size_t kDepth = 1;  // reduction indices an element holds
    static HWY_INLINE FloatVec load(const float* p) { return hn::LoadU(FloatTag(), p); }
    static HWY_INLINE FloatVec broadcast(const float* p) { return hn::Set(FloatTag(), *p); }
    static HWY_INLINE FloatVec mul_add(FloatVec a, FloatVec b, FloatVec c) { return hn::MulAdd(a, b, c); }
};

#if FQLA_HAVE_BF16_DOT
// Pairs of bf16, two reduction indices at a time, products and sums in fp32.
struct PairDot {
    using Element = std::uint32_t;
    static constexpr std::size_t kDepth = 2;
    static HWY_INLINE __m512i load(const std::uint32_t* p) { return _mm512_loadu_si512(p); }
    static HWY_INLINE __m512i broadcast(const std::uint32_t* p) { return _mm512_set1_epi32(static_cast<int>(*p)); }
    static HWY_INLINE FloatVec mul_add(__m512i a, __m512i b, FloatVec c) {
        return FloatVec{_mm512_dpbf16_ps(c.raw, (__m512bh)a, (__m512bh)b)};
    }
};
#endif

}  // namespace HWY_NAMESPACE
}  // namespace flashqla::cpu
FQLA_END_TARGET

#endif  // toggled guard
