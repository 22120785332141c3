// Matrices in shared memory as operands of the matrix units.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/device/operand.cuh"

namespace flashqla::cuda {

// kRows x kColumns, kRows x (kColumns + 8) in memory: with a stride of an odd number of 16 bytes the eight rows that
// ldmatrix reads together lie in different banks. Parts lie one after the other.
template <class Op_, int kRows_, int kColumns_>
struct SharedTile {
    using Op = Op_;
    using Element = typename Op::Element;
    static constexpr int kRows = kRows_, kColumns = kColumns_, kStride = kColumns + 8;
    static constexpr int kPart = kRows * kStride;  // elements of a part
    static_assert(kColumns % 16 == 0 && kRows % 16 == 0);

    alignas(16) Element x[Op::kParts * kPart];

    // Bytes from the tile's beginning; rows that are a multiple of 8 apart lie that many kRowBytes apart.
    static constexpr int kRowBytes = kStride * static_cast<int>(sizeof(Element));
    static __device__ __forceinline__ int offset(int row, int column) {
        return row * kRowBytes + column * static_cast<int>(sizeof(Element));
    }

    // A[m][k] = tile[m0 + m][k0 + k]
    __device__ __forceinline__ Fragment<Op> a(int m0, int k0) const {
        return load<false>(m0 + lane() % 16, k0 + lane() / 16 * 8);
    }
    // A[m][k] = tile[k0 + k][m0 + m]
    __device__ __forceinline__ Fragment<Op> a_transposed(int k0, int m0) const {
        return load<true>(k0 + lane() % 8 + lane() / 16 * 8, m0 + lane() / 8 % 2 * 8);
    }
    // B[k][n] = tile[n0 + n][k0 + k]
    __device__ __forceinline__ Fragment<Op> b_transposed(int n0, int k0) const {
        return load<false>(n0 + lane() % 8 + lane() / 16 * 8, k0 + lane() / 8 % 2 * 8);
    }
    // B[k][n] = tile[k0 + k][n0 + n]
    __device__ __forceinline__ Fragment<Op> b(int k0, int n0) const {
        return load<true>(k0 + lane() % 16, n0 + lane() / 16 * 8);
    }

    // A pair of neighbours in a row.
    __device__ __forceinline__ void set(int row, int column, Pair<Op> pair) {
#pragma unroll
        for (int part = 0; part < Op::kParts; ++part) {
            *reinterpret_cast<std::uint32_t*>(x + part * kPart + row * kStride + column) = pair.part[part];
        }
    }
    __device__ __forceinline__ Pair<Op> get(int row, int column) const {
        Pair<Op> pair;
#pragma unroll
        for (int part = 0; part < Op::kParts; ++part) {
            pair.part[part] = *reinterpret_cast<const std::uint32_t*>(x + part * kPart + row * kStride + column);
        }
        return pair;
    }

private:
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }

    template <bool kTransposed>
    __device__ __forceinline__ Fragment<Op> load(int row, int column) const {
        Fragment<Op> f;
        const std::uint32_t address = shared_address(x + row * kStride + column);
#pragma unroll
        for (int part = 0; part < Op::kParts; ++part) {
            const std::uint32_t of_part = address + part * kPart * static_cast<int>(sizeof(Element));
            if constexpr (kTransposed) {
                ldmatrix_transposed(f.x[part], of_part);
            } else {
                ldmatrix(f.x[part], of_part);
            }
        }
        return f;
    }
};

// The 16x16 blocks on and below the diagonal of a square matrix. A block is four 8x8 blocks of 128 bytes each, so that
// ldmatrix reads 512 neighbouring bytes, and the whole triangle is copied to and from memory as it lies.
template <class Op, int kRows>
struct SharedTriangle {
    using Element = typename Op::Element;
    static constexpr int kBlocks = kRows / 16, kPart = kBlocks * (kBlocks + 1) / 2 * 256;  // elements of a part
    static constexpr int kElements = Op::kParts * kPart;

    alignas(16) Element x[kElements];

    // As in SharedTile, of block (row, column), row >= column.
    __device__ __forceinline__ Fragment<Op> a(int row, int column) const { return load<false, true>(row, column); }
    __device__ __forceinline__ Fragment<Op> a_transposed(int row, int column) const {
        return load<true, false>(row, column);
    }
    // B[k][n] = block[n][k]
    __device__ __forceinline__ Fragment<Op> b_transposed(int row, int column) const {
        return load<false, false>(row, column);
    }
    // B[k][n] = block[k][n]
    __device__ __forceinline__ Fragment<Op> b(int row, int column) const { return load<true, true>(row, column); }

    // Where a lane's row of block (row, column) lies in shared memory, for four 8x8 blocks at a time: those on top
    // first.
    __device__ __forceinline__ std::uint32_t place(int row, int column, int lane) const {
        return shared_address(x + block(row, column) + lane * 8);
    }
    // Where element (row, column) of the matrix lies; columns 8 i .. 8 i + 7 are neighbours.
    static __device__ __forceinline__ int at(int row, int column) {
        return block(row / 16, column / 16) + (row % 16 / 8 * 2 + column % 16 / 8) * 64 + row % 8 * 8 + column % 8;
    }
    __device__ __forceinline__ void set(int row, int column, Pair<Op> pair) {
#pragma unroll
        for (int part = 0; part < Op::kParts; ++part) {
            *reinterpret_cast<std::uint32_t*>(x + part * kPart + at(row, column)) = pair.part[part];
        }
    }
    __device__ __forceinline__ Pair<Op> get(int row, int column) const {
        Pair<Op> pair;
#pragma unroll
        for (int part = 0; part < Op::kParts; ++part) {
            pair.part[part] = *reinterpret_cast<const std::uint32_t*>(x + part * kPart + at(row, column));
        }
        return pair;
    }

private:
    static __device__ __forceinline__ int block(int row, int column) { return (row * (row + 1) / 2 + column) * 256; }

    // kSwapped: the second 8x8 block of the fragment lies below the first one, not beside it.
    template <bool kTransposed, bool kSwapped>
    __device__ __forceinline__ Fragment<Op> load(int row, int column) const {
        const int lane = static_cast<int>(threadIdx.x % 32), eight = lane / 8;
        const int quarter = kSwapped ? eight % 2 * 2 + eight / 2 : eight;
        const std::uint32_t address = shared_address(x + block(row, column) + quarter * 64 + lane % 8 * 8);
        Fragment<Op> f;
#pragma unroll
        for (int part = 0; part < Op::kParts; ++part) {
            if constexpr (kTransposed) {
                ldmatrix_transposed(f.x[part], address + part * kPart * 2);
            } else {
                ldmatrix(f.x[part], address + part * kPart * 2);
            }
        }
        return f;
    }
};

// Rows of a caller's tensor: `rows` of them, `columns` elements each, `stride` elements apart.
template <class T>
struct GlobalRows {
    const T* data;
    std::int64_t stride;
    int rows, columns;

    // Whether 16 bytes can be copied at a time, all of them inside a row or none.
    __device__ __forceinline__ bool whole_vectors() const {
        constexpr int kVector = 16 / sizeof(T);
        return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride % kVector == 0 && columns % kVector == 0;
    }
};

// Fills a tile from global memory by kThreads threads; what lies outside the rows or columns becomes zero, whatever
// memory holds there. One element after another: for what the background copies cannot do.
template <int kThreads, class Tile>
__device__ __noinline__ void fill_by_element(Tile& tile, GlobalRows<typename Tile::Op::Input> from) {
    using Op = typename Tile::Op;
    constexpr int kPairs = Tile::kColumns / 2;
#pragma unroll 4
    for (int at = static_cast<int>(threadIdx.x) % kThreads; at < Tile::kRows * kPairs; at += kThreads) {
        const int row = at / kPairs, column = at % kPairs * 2;
        float x[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const bool inside = row < from.rows && column + j < from.columns;
            x[j] = inside ? to_float(from.data[row * from.stride + column + j]) : 0.0f;
        }
        tile.set(row, column, Pair<Op>::of(x[0], x[1]));
    }
}

// Fills a tile with one chunk's rows after another. 16-bit types travel in the background where alignment allows, from
// addresses that walk along instead of being computed anew each time. The threads are kThreads neighbours, the first of
// them a multiple of kThreads.
template <int kThreads, class Tile>
class RowWalk {
    using Op = typename Tile::Op;
    using Input = typename Op::Input;
    static constexpr int kRows = Tile::kRows, kVectors = Tile::kColumns / 8;  // 16 bytes each
    static constexpr int kStep = kThreads / kVectors;                         // rows at a time
    static_assert(kThreads % kVectors == 0 && kRows % kStep == 0);

public:
    RowWalk() = default;
    __device__ __forceinline__ explicit RowWalk(const GlobalRows<Input>& from)
        : at_(from.data), copies_(Op::kParts == 1 && from.whole_vectors()), inside_(column() < from.columns) {
        if (copies_) at_ += row() * from.stride + column();
    }

    // Whether rows travel in the background; else they are there when next() returns.
    __device__ __forceinline__ bool copies() const { return copies_; }

    // Fills the tile with the next kRows rows, `rows` of which exist.
    __device__ __forceinline__ void next(Tile& tile, std::int64_t stride, int rows, int columns) {
        if (!copies_) {
            fill_by_element<kThreads>(tile, GlobalRows<Input>{at_, stride, rows, columns});
        } else {
            const std::uint32_t to = shared_address(tile.x) + Tile::offset(row(), column());
            const int limit = inside_ ? rows - row() : 0;
            const Input* from = at_;
#pragma unroll
            for (int i = 0; i < kRows; i += kStep, from += kStep * stride) {
                copy_16_async(to + i * Tile::kRowBytes, from, i < limit);
            }
        }
        at_ += kRows * stride;
    }

private:
    static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x) % kThreads; }
    static __device__ __forceinline__ int row() { return thread() / kVectors; }
    static __device__ __forceinline__ int column() { return thread() % kVectors * 8; }

    const Input* at_;
    bool copies_, inside_;
};

// Fills a tile once: in the background where types and alignment allow, which it says; the caller commits and waits.
template <int kThreads, class Tile>
__device__ __forceinline__ bool fill(Tile& tile, const GlobalRows<typename Tile::Op::Input>& from) {
    RowWalk<kThreads, Tile> walk(from);
    walk.next(tile, from.stride, from.rows, from.columns);
    return walk.copies();
}

// Copies the first bytes of a record to shared memory as they are, in the background.
template <int kThreads, int kBytes>
__device__ __forceinline__ void copy_record(void* to, const void* from) {
    static_assert(kBytes % 16 == 0);
    const int thread = static_cast<int>(threadIdx.x) % kThreads;
    const std::uint32_t first = shared_address(to) + 16 * thread;
    const char* at = static_cast<const char*>(from) + 16 * thread;
#pragma unroll
    for (int i = 0; i < kBytes / 16; i += kThreads) {
        if (i + kThreads <= kBytes / 16 || i + thread < kBytes / 16) copy_16_async(first + 16 * i, at + 16 * i, true);
    }
}

}  // namespace flashqla::cuda
