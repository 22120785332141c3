// Strips of states between the caller's tensors (either layout, any dtype) and [K,strip] float tiles. Compiled per
// target.

// NOTE: the guard toggles, see simd-inl.hpp.
#if defined(FQLA_CPU_STATES_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FQLA_CPU_STATES_INL_HPP_
#undef FQLA_CPU_STATES_INL_HPP_
#else
#define FQLA_CPU_STATES_INL_HPP_
#endif

#include <algorithm>

#include "cpu/simd-inl.hpp"

FQLA_BEGIN_TARGET
namespace flashqla::cpu {
namespace HWY_NAMESPACE {

// A [K, strip] block of a state as rows of `ld` floats; rows dim_k..padded_k-1 and columns past the state are zero.
struct Tile {
    float* data;
    std::size_t ld;
    std::size_t dim_k, padded_k;
};

// Columns a transpose touches: whole groups of four, where a strip has that many.
HWY_INLINE std::size_t turned_rows(std::size_t columns) {
    return strip_columns() < 4 ? columns : (columns + 3) / 4 * 4;
}

// Columns [v0, v0 + columns) of state (row, head). `turn` is scratch of [strip, padded_k] floats for the vk layout.
HWY_INLINE void load_tile(const StateRef& s, std::int64_t row, std::int64_t head, std::size_t v0, std::size_t columns,
                          const Tile& tile, float* turn) {
    const std::int64_t base = s.offset(row, head);
    const bool by_row = s.v == 1;
    for (std::size_t k = 0; k < tile.padded_k; ++k) {
        float* to = tile.data + k * tile.ld;
        const std::size_t used = by_row && k < tile.dim_k ? columns : 0;
        if (used) load_row(s.data, s.dtype, base + std::int64_t(k) * s.k + std::int64_t(v0), columns, to);
        for (std::size_t j = used; j < strip_columns(); ++j) to[j] = 0.0f;
    }
    if (by_row) return;
    const std::size_t rows = turned_rows(columns), wide = (tile.dim_k + 3) / 4 * 4;
    fill(turn, rows * tile.padded_k, 0.0f);
    for (std::size_t v = 0; v < columns; ++v)
        load_row(s.data, s.dtype, base + std::int64_t(v0 + v) * s.v, tile.dim_k, turn + v * tile.padded_k);
    transpose(turn, tile.padded_k, rows, wide, tile.data, tile.ld);
}

HWY_INLINE void store_tile(const Tile& tile, std::size_t v0, std::size_t columns, const StateRef& s, std::int64_t row,
                           std::int64_t head, float* turn) {
    const std::int64_t base = s.offset(row, head);
    if (s.v == 1) {
        for (std::size_t k = 0; k < tile.dim_k; ++k)
            store_row(tile.data + k * tile.ld, columns, s.data, s.dtype,
                      base + std::int64_t(k) * s.k + std::int64_t(v0));
        return;
    }
    const std::size_t rows = turned_rows(columns), wide = (tile.dim_k + 3) / 4 * 4;
    transpose(tile.data, tile.ld, wide, rows, turn, tile.padded_k);
    for (std::size_t v = 0; v < columns; ++v)
        store_row(turn + v * tile.padded_k, tile.dim_k, s.data, s.dtype, base + std::int64_t(v0 + v) * s.v);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashqla::cpu
FQLA_END_TARGET

#endif  // toggled guard
