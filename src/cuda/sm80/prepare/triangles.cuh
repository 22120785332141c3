// The two triangles of one value head, each by one warp that meets nobody: products of rows in, triangle out, the way
// between in its registers.
//
// L is used with its sign turned, N = -L, so that T = (I - N)^-1 is sums of products. The diagonal blocks of 16 are
// solved by forward substitution in fp32; two of them and N between them make a block of 32, two of those the whole:
//
//   T = [ A 0 ]   with   C = B (N_ba A)
//       [ C B ]
//
// An accumulator, rounded, is the next product's A, or as it lies the transpose of the next product's B: (N_ba A)^T is
// computed and not N_ba A, and nothing is exchanged between lanes but a few transposes. No series of powers and no
// bound on the keys is assumed.
#pragma once

#include "cuda/device/token_columns.cuh"
#include "cuda/sm80/prepare/config.cuh"

namespace flashqla::cuda::sm80 {

// The transpose of a 16x16 A fragment, as B.
template <class Op>
__device__ __forceinline__ Fragment<Op> turned(const Fragment<Op>& a) {
    Fragment<Op> b;
#pragma unroll
    for (int octet = 0; octet < 4; ++octet) b.set(octet, a.pair(octet % 2 * 2 + octet / 2));
    return b;
}

template <class Config>
class HeadTriangles {
    using Op = typename Config::Op;
    // Two bf16 parts whatever the operands are: what the inverse is made of is more exact than what it is rounded to.
    using Exact = F32Operand;
    using Matrix = Fragment<Exact>;  // a 16x16 block
    using Products = RowProducts<Config::kBlocks>;
    static constexpr int kBlocks = Config::kBlocks;

    struct Block {
        float left[4], right[4];  // two neighbouring accumulators
    };

public:
    __device__ __forceinline__ HeadTriangles(const HeadFactors<Config::kChunk>& factors, const float* norm_k)
        : f_(factors), norm_k_(norm_k) {}

    // P = tril(Gamma o Q^ K^^T)
    __device__ __forceinline__ void attention(const Products& qk, const float* norm_q, typename Op::Element* to) const {
#pragma unroll 1
        for (int row = 0; row < kBlocks; ++row) {
#pragma unroll 1
            for (int column = 0; column < row; ++column) {
                put<Op>(to, row, column, scaled(qk, norm_q, f_.row_attention, row, column));
            }
            put<Op>(to, row, row, scaled_diagonal<0>(qk, norm_q, f_.row_attention, row));
        }
    }

    // T = (I + stril(beta Gamma o K^ K^^T))^-1
    __device__ __forceinline__ void inverse(const Products& kk, DiagonalBlocks<kBlocks>& diagonal,
                                            typename Op::Element* to) const {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            const Block n = scaled_diagonal<1>(kk, f_.own_lower, f_.row_lower, b);
            diagonal_pair(diagonal, b, 0, 0) = {n.left[0], n.left[1]};
            diagonal_pair(diagonal, b, 8, 0) = {n.left[2], n.left[3]};
            diagonal_pair(diagonal, b, 8, 8) = {n.right[2], n.right[3]};
        }
        __syncwarp();
        substitute(diagonal);
        Matrix d[kBlocks];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            const float2 a = diagonal_pair(diagonal, b, 0, 0), c = diagonal_pair(diagonal, b, 8, 0),
                         e = diagonal_pair(diagonal, b, 8, 8);
            const Block x{{a.x, a.y, c.x, c.y}, {0.0f, 0.0f, e.x, e.y}};
            put<TwoParts<Op>>(to, b, b, x);
            d[b] = Matrix::of(x.left, x.right);
        }
        if constexpr (kBlocks == 2) {
            Block y{}, c{};  // (N A)^T and C^T
            multiply_turned(y, transposed(d[0]), lower(kk, 1, 0));
            multiply_turned(c, matrix(y), d[1]);
            put<TwoParts<Op>>(to, 1, 0, c, true);
        } else {
            join(kk, d, to);
        }
    }

private:
    // The blocks of T below the diagonal ones, d.
    __device__ __forceinline__ void join(const Products& kk, const Matrix (&d)[kBlocks],
                                         typename Op::Element* to) const {
        static_assert(kBlocks == 4);
        Matrix beside[2];  // C of the blocks of 32
#pragma unroll
        for (int b = 0; b < 4; b += 2) {
            Block y{}, c{};  // y = (N A)^T
            multiply_turned(y, transposed(d[b]), lower(kk, b + 1, b));
            multiply_turned(c, d[b + 1], matrix(y));
            put<TwoParts<Op>>(to, b + 1, b, c);
            beside[b / 2] = matrix(c);
        }
        const Matrix a0 = transposed(d[0]), a1 = transposed(d[1]), ac = transposed(beside[0]);
        Block last[2]{};  // row 3 of T
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            __syncwarp();  // NOTE: keeps the loads of the second row from being issued, and spilled, before the first
            Block first{}, second{};
            multiply_turned(first, a0, lower(kk, 2 + row, 0));
            const Matrix n = lower(kk, 2 + row, 1);
            multiply_turned(second, a1, n);
            multiply_turned(first, ac, n);
            const Matrix y[2] = {matrix(first), matrix(second)};
#pragma unroll
            for (int column = 0; column < 2; ++column) {
                if (row == 0) {
                    Block c{};
                    multiply_turned(c, d[2], y[column]);
                    put<TwoParts<Op>>(to, 2, column, c);
                }
                multiply_turned(last[column], row == 0 ? beside[1] : d[3], y[column]);
            }
        }
        put<TwoParts<Op>>(to, 3, 0, last[0]);
        put<TwoParts<Op>>(to, 3, 1, last[1]);
    }

    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
    // Where this lane's elements of a block lie: rows row() and the one 8 below, columns column(), the next, and 8 on.
    static __device__ __forceinline__ int row() { return lane() / 4; }
    static __device__ __forceinline__ int column() { return 2 * (lane() % 4); }

    static __device__ __forceinline__ float2& diagonal_pair(DiagonalBlocks<kBlocks>& d, int block, int i, int j) {
        return *reinterpret_cast<float2*>(d.at(block, i + row(), j + column()));
    }

    // --------------------------------------------------------------------------------------------------- scaling

    // A block below the diagonal.
    __device__ __forceinline__ Block scaled(const Products& products, const float* own, const float* rows,
                                            int block_row, int block_column) const {
        const float4 left = products.at(block_row, block_column, 0), right = products.at(block_row, block_column, 1);
        const int i = 16 * block_row + row(), j = 16 * block_column + column();
        if constexpr (kBlocks == 2) {
            Block x{{left.x, left.y, left.z, left.w}, {right.x, right.y, right.z, right.w}};
            scale_by_exponent<0>(own, i, j, x.left[0], x.left[1]);
            scale_by_exponent<0>(own, i + 8, j, x.left[2], x.left[3]);
            scale_by_exponent<0>(own, i, j + 8, x.right[0], x.right[1]);
            scale_by_exponent<0>(own, i + 8, j + 8, x.right[2], x.right[3]);
            return x;
        }
        const float2 c0 = pair_of(f_.column, j), c1 = pair_of(f_.column, j + 8);
        const float2 near = pair_of(f_.between[2 * block_row], 2 * block_column),
                     far = pair_of(f_.between[2 * block_row + 1], 2 * block_column);
        const float r0 = rows[i], r1 = rows[i + 8];
        return {{r0 * near.x * (c0.x * left.x), r0 * near.x * (c0.y * left.y), r1 * far.x * (c0.x * left.z),
                 r1 * far.x * (c0.y * left.w)},
                {r0 * near.y * (c1.x * right.x), r0 * near.y * (c1.y * right.y), r1 * far.y * (c1.x * right.z),
                 r1 * far.y * (c1.y * right.w)}};
    }

    // A diagonal block, zero above its kBelow-th diagonal.
    template <int kBelow>
    __device__ __forceinline__ Block scaled_diagonal(const Products& products, const float* own, const float* rows,
                                                     int block) const {
        const float4 left = products.at(block, block, 0), right = products.at(block, block, 1);
        const int i = 16 * block + row(), j = 16 * block + column();
        Block x{{left.x, left.y, left.z, left.w}, {0.0f, 0.0f, right.z, right.w}};
        scale_by_exponent<kBelow>(own, i, j, x.left[0], x.left[1]);
        if constexpr (kBlocks == 2) {
            scale_by_exponent<0>(own, i + 8, j, x.left[2], x.left[3]);
        } else {
            const float2 c = pair_of(f_.column, j);
            x.left[2] = rows[i + 8] * (c.x * left.z);
            x.left[3] = rows[i + 8] * (c.y * left.w);
        }
        scale_by_exponent<kBelow>(own, i + 8, j + 8, x.right[2], x.right[3]);
        return x;
    }

    // Elements (i, j) and (i, j + 1), zero above the kBelow-th diagonal, where exponents may be positive: selected, not
    // multiplied.
    template <int kBelow>
    __device__ __forceinline__ void scale_by_exponent(const float* own, int i, int j, float& x0, float& x1) const {
        const float2 high = pair_of(f_.high, j), low = pair_of(f_.low, j), norm = pair_of(norm_k_, j);
        const float high_i = f_.high[i], low_i = f_.low[i], own_i = own[i];
        const float e0 = __expf((high_i - high.x) + (low_i - low.x)) * norm.x,
                    e1 = __expf((high_i - high.y) + (low_i - low.y)) * norm.y;
        x0 = i >= j + kBelow ? own_i * e0 * x0 : 0.0f;
        x1 = i >= j + 1 + kBelow ? own_i * e1 * x1 : 0.0f;
    }

    __device__ __forceinline__ Matrix lower(const Products& kk, int block_row, int block_column) const {
        return matrix(scaled(kk, f_.own_lower, f_.row_lower, block_row, block_column));
    }

    // -------------------------------------------------------------------------------------------------- matrices

    // (I - N)^-1 of all diagonal blocks in place: a lane has columns c and c + 8 of one block.
    static __device__ __forceinline__ void substitute(DiagonalBlocks<kBlocks>& diagonal) {
        const int block = lane() / 8 % kBlocks, c = lane() % 8;
        float x[16], y[8];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float first = i == c ? 1.0f : 0.0f, second = i - 8 == c ? 1.0f : 0.0f;
#pragma unroll
            for (int j = 0; j < i; j += 4) {
                const float4 four = *reinterpret_cast<const float4*>(diagonal.at(block, i, j));
                const float n[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (j + e >= i) continue;
                    first = fmaf(n[e], x[j + e], first);
                    if (j >= 8) second = fmaf(n[e], y[j + e - 8], second);
                }
            }
            x[i] = first;
            if (i >= 8) y[i - 8] = second;
        }
        __syncwarp();
        if (lane() / 8 < kBlocks) {
#pragma unroll
            for (int i = 0; i < 16; ++i) *diagonal.at(block, i, c) = x[i];
#pragma unroll
            for (int i = 0; i < 8; ++i) *diagonal.at(block, 8 + i, 8 + c) = y[i];
        }
        __syncwarp();
    }

    static __device__ __forceinline__ Matrix matrix(const Block& x) { return Matrix::of(x.left, x.right); }

    // x += A X^T
    static __device__ __forceinline__ void multiply_turned(Block& x, const Matrix& a, const Matrix& b) {
        multiply(x.left, x.right, a, turned(b));
    }

    template <class As>
    static __device__ __forceinline__ Fragment<As> transposed(const Fragment<As>& m) {
        Fragment<As> t;
#pragma unroll
        for (int part = 0; part < As::kParts; ++part)
#pragma unroll
            for (int octet = 0; octet < 4; ++octet) {
                t.x[part][octet] = transpose_8x8(m.x[part][octet % 2 * 2 + octet / 2]);
            }
        return t;
    }

    // The block of a triangle, or its transpose, with the layout of SharedTriangle: each octet is 128 neighbouring
    // bytes.
    template <class As>
    static __device__ __forceinline__ void put(typename Op::Element* triangle, int block_row, int block_column,
                                               const Block& x, bool transpose = false) {
        using Triangle = SharedTriangle<As, Config::kChunk>;
        typename Op::Element* at = triangle + Triangle::at(16 * block_row + row(), 16 * block_column + column());
        Fragment<As> f = Fragment<As>::of(x.left, x.right);
        if (transpose) f = transposed(f);
#pragma unroll
        for (int part = 0; part < As::kParts; ++part)
#pragma unroll
            for (int octet = 0; octet < 4; ++octet) {
                *reinterpret_cast<std::uint32_t*>(at + part * Triangle::kPart + (octet % 2 * 2 + octet / 2) * 64) =
                    f.x[part][octet];
            }
    }

    const HeadFactors<Config::kChunk>& f_;
    const float* norm_k_;
};

}  // namespace flashqla::cuda::sm80
