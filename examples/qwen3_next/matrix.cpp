#include "matrix.hpp"

#include <algorithm>

namespace qwen3_next {
namespace {

constexpr std::int64_t kLanes = 16;       // columns of y that a tile computes: one 512-bit register or two of 256 bits
constexpr std::int64_t kTileRows = 6;     // 6 x 16 sums fit into the 16 registers of AVX2
constexpr std::int64_t kBlockRows = 96;   // rows of x that a task keeps in the second-level cache
constexpr std::int64_t kSmall = 1 << 19;  // multiply-adds below which threads cost more than they give

// GCC's and Clang's vectors, wide enough for every instruction set; narrower ones use several registers. Not aligned.
using Lanes [[gnu::vector_size(64), gnu::aligned(4), gnu::may_alias]] = float;

template <int kRows>
[[gnu::always_inline]] inline void tile(const float* panel, const float* x, std::int64_t in, float* y, std::int64_t out,
                                        std::int64_t columns, bool add) {
    Lanes sum[kRows] = {};  // [kRows, 16]
    for (std::int64_t k = 0; k < in; ++k) {
        const Lanes w = *reinterpret_cast<const Lanes*>(panel + k * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sum[r] += w * x[r * in + k];
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        float* row = y + r * out;
        if (columns == kLanes) {
            Lanes& target = *reinterpret_cast<Lanes*>(row);
            target = add ? target + sum[r] : sum[r];
        } else {
            for (std::int64_t c = 0; c < columns; ++c) row[c] = add ? row[c] + sum[r][c] : sum[r][c];
        }
    }
}

// Sixteen columns of y for all rows.
QWEN3_CLONES void multiply_panel(const float* panel, const float* x, std::int64_t rows, std::int64_t in, float* y,
                                 std::int64_t out, std::int64_t columns, bool add) {
    std::int64_t r = 0;
    for (; r + kTileRows <= rows; r += kTileRows) {
        tile<kTileRows>(panel, x + r * in, in, y + r * out, out, columns, add);
    }
    for (; r < rows; ++r) tile<1>(panel, x + r * in, in, y + r * out, out, columns, add);
}

}  // namespace

Matrix::Matrix(std::span<const float> weight, std::int64_t out, std::int64_t in)
    : out_(out), in_(in), panels_(static_cast<std::size_t>((out + kLanes - 1) / kLanes * kLanes * in)) {
    for (std::int64_t n = 0; n < out; ++n) {
        float* column = panels_.data() + n / kLanes * kLanes * in + n % kLanes;
        for (std::int64_t k = 0; k < in; ++k) column[k * kLanes] = weight[static_cast<std::size_t>(n * in + k)];
    }
}

void Matrix::multiply(const float* x, std::int64_t rows, float* y) const { run(x, rows, y, false); }

void Matrix::multiply_and_add(const float* x, std::int64_t rows, float* y) const { run(x, rows, y, true); }

void Matrix::run(const float* x, std::int64_t rows, float* y, bool add) const {
    const std::int64_t panels = (out_ + kLanes - 1) / kLanes;
    const std::int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
#pragma omp parallel for collapse(2) schedule(static) if (rows * out_ * in_ > kSmall)
    for (std::int64_t block = 0; block < blocks; ++block) {
        for (std::int64_t panel = 0; panel < panels; ++panel) {
            const std::int64_t row = block * kBlockRows, column = panel * kLanes;
            multiply_panel(panels_.data() + column * in_, x + row * in_, std::min(kBlockRows, rows - row), in_,
                           y + row * out_ + column, out_, std::min(kLanes, out_ - column), add);
        }
    }
}

}  // namespace qwen3_next
