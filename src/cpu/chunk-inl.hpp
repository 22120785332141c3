// A chunk's keys and queries as product operands, shared by the value heads of a group; scratch carving; the
// bookkeeping of checkpoints. Compiled per target.

// NOTE: the guard toggles, see simd-inl.hpp.
#if defined(FQLA_CPU_CHUNK_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FQLA_CPU_CHUNK_INL_HPP_
#undef FQLA_CPU_CHUNK_INL_HPP_
#else
#define FQLA_CPU_CHUNK_INL_HPP_
#endif

#include <algorithm>
#include <limits>

#include "base/workspace.hpp"
#include "cpu/gates-inl.hpp"
#include "cpu/simd-inl.hpp"
#include "cpu/tile-inl.hpp"

FQLA_BEGIN_TARGET
namespace flashqla::cpu {
namespace HWY_NAMESPACE {

// Carves aligned arrays out of scratch memory; with a null base it only counts.
struct Taker {
    std::byte* base;
    std::size_t used = 0;

    template <class T>
    void take(T*& pointer, std::size_t count) {
        pointer = base ? reinterpret_cast<T*>(base + used) : nullptr;
        used += aligned_size(count * sizeof(T));
    }
    std::size_t bytes() const { return used; }
};

// K rounded up so that products of either operand type run in whole blocks.
template <class Dot>
HWY_INLINE std::size_t padded_rows(std::size_t dim_k) {
    constexpr std::size_t kPad = kTileRows * Dot::kDepth;
    return (dim_k + kPad - 1) / kPad * kPad;
}

HWY_INLINE void scale_row(float* row, std::size_t n, float factor) {
    const FloatTag d;
    const auto f = hn::Set(d, factor);
    for (std::size_t i = 0; i < n; i += lanes()) hn::StoreU(hn::Mul(f, hn::LoadU(d, row + i)), d, row + i);
}

#if FQLA_HAVE_BF16_DOT
// a, then b, rounded to bf16: neighbours share a word.
HWY_INLINE hn::Vec<WordTag> bf16_words(FloatVec a, FloatVec b) {
    return hn::Vec<WordTag>{(__m512i)_mm512_cvtne2ps_pbh(b.raw, a.raw)};
}

// (a, b) rounded to bf16 and interleaved: the low half of word j is a[j], the high half b[j].
HWY_INLINE hn::Vec<WordTag> bf16_pair(FloatVec a, FloatVec b) {
    alignas(64) static constexpr std::uint16_t kInterleave[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                                  21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                                  11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return hn::Vec<WordTag>{_mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), bf16_words(a, b).raw)};
}

// What bf16_pair(a, b) leaves out, as a pair.
HWY_INLINE hn::Vec<WordTag> bf16_residual(FloatVec a, FloatVec b) {
    const FloatTag d;
    const WordTag du;
    const auto pair = bf16_pair(a, b);
    return bf16_pair(hn::Sub(a, hn::BitCast(d, hn::ShiftLeft<16>(pair))),
                     hn::Sub(b, hn::BitCast(d, hn::And(pair, hn::Set(du, 0xffff0000u)))));
}

HWY_INLINE void store_halves(hn::Vec<WordTag> words, std::uint32_t* low, std::uint32_t* high) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), _mm512_castsi512_si256(words.raw));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), _mm512_extracti64x4_epi64(words.raw, 1));
}
#else
// Named by templates that other targets never instantiate with pairs.
HWY_INLINE hn::Vec<WordTag> bf16_words(FloatVec a, FloatVec) { return hn::BitCast(WordTag(), a); }
HWY_INLINE hn::Vec<WordTag> bf16_pair(FloatVec a, FloatVec) { return hn::BitCast(WordTag(), a); }
HWY_INLINE hn::Vec<WordTag> bf16_residual(FloatVec a, FloatVec) { return hn::BitCast(WordTag(), a); }
HWY_INLINE void store_halves(hn::Vec<WordTag>, std::uint32_t*, std::uint32_t*) {}
#endif

// State tile [pk, strip] as operand of the products that reduce over K.
template <class Dot>
HWY_INLINE void make_operand(const float* state, std::size_t pk, typename Dot::Element* operand) {
    if constexpr (Dot::kDepth == 2) {
        const FloatTag d;
        const std::size_t strip = strip_columns();
        for (std::size_t k = 0; k < pk; k += 2)
            for (std::size_t j = 0; j < strip; j += lanes())
                hn::StoreU(bf16_pair(hn::Load(d, state + k * strip + j), hn::Load(d, state + (k + 1) * strip + j)),
                           WordTag(), operand + k / 2 * strip + j);
    }
}

// The keys and queries of one chunk of C tokens of one key head. "Blocked" is the layout of tile-inl.hpp.
template <class Dot, std::size_t C>
struct ChunkKeys {
    using Element = typename Dot::Element;
    Element* keys;      // [C, padded_k/depth] blocked: reductions over K
    Element* queries;   // [C, padded_k/depth] blocked
    Element* by_token;  // [C/depth, padded_k] blocked: reductions over tokens; the same memory as keys for floats
    Element* turned;    // [padded_k/depth, 2C] keys | queries
    Element* row;       // [padded_k/depth] one token
    float* floats;      // [padded_k]
    float* gram_k;      // [C,C] k_j . k_i
    float* gram_q;      // [C,C] k_j . q_i
    float* norm_k;      // [C] 1 / |k_i|, or 1; 0 on padded rows
    float* norm_q;      // [C] scale / |q_i|, or scale; 0 on padded rows
    std::size_t pk, depth_k;

    template <class Booker>
    void book(Booker& b, std::size_t padded_k) {
        pk = padded_k, depth_k = pk / Dot::kDepth;
        b.take(keys, C * depth_k), b.take(queries, C * depth_k);
        if constexpr (Dot::kDepth == 1)
            by_token = keys;
        else
            b.take(by_token, C * depth_k);
        b.take(turned, 2 * C * depth_k);
        b.take(row, depth_k), b.take(floats, pk);
        b.take(gram_k, C * C), b.take(gram_q, C * C);
        b.take(norm_k, C), b.take(norm_q, C);
    }

    // n tokens from `first` on; rows up to `padded` are zero.
    HWY_INLINE void load(const Inputs& in, const Span& span, std::int64_t first, std::size_t n, std::size_t padded,
                         std::int32_t key_head) {
        load_one(in, in.k, span, first, n, padded, key_head, 1.0f, norm_k, keys, turned);
        load_one(in, in.q, span, first, n, padded, key_head, in.problem.scale, norm_q, queries, turned + C);
        if constexpr (Dot::kDepth == 2) pair_tokens(padded);
        products(padded);
    }

private:
    HWY_INLINE void load_one(const Inputs& in, const TokenRef& x, const Span& span, std::int64_t first, std::size_t n,
                             std::size_t padded, std::int32_t head, float factor, float* norm, Element* to,
                             Element* to_turned) {
        const auto dim = static_cast<std::size_t>(in.problem.dim_k);
        for (std::size_t t = 0; t < padded; ++t) {
            if (t >= n) {
                for (std::size_t k = 0; k < depth_k; k += kTileRows)
                    std::memset(to + k * C + t * kTileRows, 0, kTileRows * sizeof(Element));
                norm[t] = 0.0f;
                continue;
            }
            const std::int64_t at = x.offset(span.batch, span.begin + first + static_cast<std::int64_t>(t), head);
            float* loaded = floats;
            if constexpr (Dot::kDepth == 1) {
                loaded = row;
            } else {
                auto* half = reinterpret_cast<std::uint16_t*>(row);
                std::memcpy(half, static_cast<const std::uint16_t*>(x.data) + at, dim * 2);
                std::memset(half + dim, 0, (pk - dim) * 2);
            }
            if (Dot::kDepth == 1 || in.problem.qk_l2norm) {
                load_row(x.data, x.dtype, at, dim, loaded);
                for (std::size_t k = dim; k < pk; ++k) loaded[k] = 0.0f;
            }
            norm[t] = factor * inverse_norm(in, loaded, dim);
            for (std::size_t k = 0; k < depth_k; k += kTileRows)
                std::memcpy(to + k * C + t * kTileRows, row + k, kTileRows * sizeof(Element));
        }
        for (std::size_t k = 0; k < depth_k; k += kTileRows)
            transpose(to + k * C, kTileRows, padded, kTileRows, to_turned + k * 2 * C, 2 * C);
    }

    // Keys once more with pairs of tokens in a word instead of pairs of channels.
    HWY_INLINE void pair_tokens(std::size_t padded) {
        for (std::size_t k = 0; k < pk; k += kTileRows)
            for (std::size_t t = 0; t < padded; t += 2) {
                const std::size_t at = k / (2 * kTileRows) * (C * kTileRows) + k % (2 * kTileRows) / 2;
                const auto* a = reinterpret_cast<const std::uint16_t*>(keys + at + t * kTileRows);
                const auto* b = reinterpret_cast<const std::uint16_t*>(keys + at + (t + 1) * kTileRows);
                Element* to = by_token + k / kTileRows * (C / 2 * kTileRows) + t / 2 * kTileRows;
                const hn::CappedTag<std::uint32_t, kTileRows> du;
                const hn::Rebind<std::uint16_t, decltype(du)> d16;
                for (std::size_t i = 0; i < kTileRows; i += hn::Lanes(du))
                    hn::StoreU(hn::Or(hn::PromoteTo(du, hn::LoadU(d16, a + i)),
                                      hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, b + i)))),
                               du, to + i);
            }
    }

    // Row tile by row tile, from the diagonal's vector on.
    HWY_INLINE void products(std::size_t padded) const {
        const FloatTag d;
        for (std::size_t j = 0; j < padded; j += kTileRows)
            for (std::size_t i = j / lanes() * lanes(); i < padded; i += lanes()) {
                FQLA_TILE_ZERO()
                FQLA_TILE_OVER_K(depth_k / kTileRows, keys + j * kTileRows, C, turned + i, 2 * C, C)
#define FQLA_ROW(r)                                \
    hn::StoreU(x##r, d, gram_k + (j + r) * C + i); \
    hn::StoreU(y##r, d, gram_q + (j + r) * C + i);
                FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
            }
    }
};

// Rows of the caller's tensors to ask for ahead of use: they lie pages apart, where no hardware prefetcher follows. The
// requests are spread over the tiles of a long product, because a burst fills the miss buffers and then stalls the
// loads behind it; and they end in the second-level cache, because the first one has turned over before the rows are
// used.
class RowsAhead {
public:
    // Columns [v, v + columns) of tokens [first, last) of one head.
    HWY_INLINE void add(const TokenRef& x, std::int64_t batch, std::int64_t first, std::int64_t last, std::int32_t head,
                        std::int64_t v, std::size_t columns) {
        if (!x || first >= last) return;
        const auto width = static_cast<std::int64_t>(size_of(x.dtype));
        const auto* at = static_cast<const std::byte*>(x.data) + (x.offset(batch, first, head) + v) * width;
        parts_[count_++] = {at, x.token * width, static_cast<std::size_t>(last - first), lines_of(x, columns)};
        lines_ += static_cast<std::size_t>(last - first) * lines_of(x, columns);
    }
    // n floats of scratch memory.
    HWY_INLINE void add(const float* at, std::size_t n) {
        parts_[count_++] = {reinterpret_cast<const std::byte*>(at), 0, 1, n * sizeof(float) / 64};
        lines_ += n * sizeof(float) / 64;
    }
    // Spreads everything added so far over `steps` steps.
    HWY_INLINE void spread(std::size_t steps) { each_ = (lines_ * kUnit + steps - 1) / steps; }
    // As many steps at once.
    HWY_INLINE void step(std::size_t steps = 1) {
        for (due_ += steps * each_; due_ >= kUnit && part_ < count_; due_ -= kUnit) {
            const Part& p = parts_[part_];
            __builtin_prefetch(p.at + static_cast<std::int64_t>(row_) * p.stride + line_ * 64, 0, 2);
            if (++line_ < p.lines) continue;
            line_ = 0;
            if (++row_ < p.rows) continue;
            row_ = 0, ++part_;
        }
    }

private:
    struct Part {
        const std::byte* at;
        std::int64_t stride;  // bytes from row to row
        std::size_t rows, lines;
    };
    static constexpr std::size_t kUnit = 1024;  // a line, so that a step can be a part of one
    Part parts_[8];
    std::size_t count_ = 0, lines_ = 0, each_ = 0, due_ = 0;
    std::size_t part_ = 0, row_ = 0, line_ = 0;
};

// Where the checkpoints of one sequence lie. Positions count tokens of the sequence.
class CheckpointCursor {
public:
    CheckpointCursor(const ForwardCall& call, std::int64_t sequence, std::int64_t first_token, std::int64_t row,
                     bool enabled)
        : call_(call),
          kind_(enabled && call.checkpoints ? call.problem.checkpoints : Checkpoints::none),
          sequence_(sequence),
          first_(first_token),
          row_(row) {}

    // Calls f(row) for every checkpoint after `t` tokens of the segment. NOTE: a segment's end is the next one's start;
    // the later segment writes it.
    template <class F>
    void visit(std::int64_t t, F&& f) const {
        const std::int64_t at = first_ + t;
        switch (kind_) {
            case Checkpoints::none: return;
            case Checkpoints::chunk_starts:
                if (at % kChunk == 0 && at < length()) f(row_ + at / kChunk);
                return;
            case Checkpoints::every_n:
                if (at > 0 && at % call_.problem.checkpoint_every == 0)
                    f(row_ + at / call_.problem.checkpoint_every - 1);
                return;
            case Checkpoints::listed:
                for (std::int64_t m = 0; m < call_.checkpoint_list.count; ++m)
                    if (call_.checkpoint_list.at(m, 0) == sequence_ && call_.checkpoint_list.at(m, 1) == at) f(m);
                return;
        }
    }

    // The first position after t where a chunk must end, counted from the segment's start.
    std::int64_t next_cut(std::int64_t t) const {
        const std::int64_t at = first_ + t;
        const auto next_multiple = [&](std::int64_t n) { return (at / n + 1) * n - first_; };
        std::int64_t cut = std::numeric_limits<std::int64_t>::max();
        if (kind_ == Checkpoints::chunk_starts) cut = next_multiple(kChunk);
        if (kind_ == Checkpoints::every_n) cut = next_multiple(call_.problem.checkpoint_every);
        if (kind_ == Checkpoints::listed)
            for (std::int64_t m = 0; m < call_.checkpoint_list.count; ++m)
                if (call_.checkpoint_list.at(m, 0) == sequence_ && call_.checkpoint_list.at(m, 1) > at)
                    cut = std::min(cut, call_.checkpoint_list.at(m, 1) - first_);
        return cut;
    }

private:
    std::int64_t length() const { return span_of(call_, sequence_).length; }

    const ForwardCall& call_;
    Checkpoints kind_;
    std::int64_t sequence_, first_, row_;
};

}  // namespace HWY_NAMESPACE
}  // namespace flashqla::cpu
FQLA_END_TARGET

#endif  // toggled guard
