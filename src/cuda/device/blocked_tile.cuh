// Matrices of the workspace as operands, in the order in which warps write them: 8x8 blocks of 128 bytes, a block row
// after the other. A warp that holds accumulators writes a block with one instruction, all of it neighbouring bytes; a
// tile of whole block rows is copied to shared memory as it lies; and ldmatrix finds its eight rows in different banks
// without padding.
#pragma once

#include <cstdint>

#include "cuda/device/shared_tile.cuh"

namespace flashqla::cuda {

template <class Op, int kRows_, int kColumns_>
struct BlockedTile {
    using Element = typename Op::Element;
    static constexpr int kRows = kRows_, kColumns = kColumns_, kPart = kRows * kColumns;  // elements of a part

    alignas(16) Element x[Op::kParts * kPart];

    // A[m][k] = tile[k0 + k][m0 + m]
    __device__ __forceinline__ Fragment<Op> a_transposed(int k0, int m0) const {
        return load(k0 / 8 + lane() / 16, m0 / 8 + lane() / 8 % 2);
    }
    // B[k][n] = tile[k0 + k][n0 + n]
    __device__ __forceinline__ Fragment<Op> b(int k0, int n0) const {
        return load(k0 / 8 + lane() / 8 % 2, n0 / 8 + lane() / 16);
    }

private:
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }

    // The lane's row of the block whose row it gives to ldmatrix.
    __device__ __forceinline__ Fragment<Op> load(int block_row, int block_column) const {
        const std::uint32_t address =
            shared_address(x + (block_row * (kColumns / 8) + block_column) * 64 + lane() % 8 * 8);
        Fragment<Op> f;
#pragma unroll
        for (int part = 0; part < Op::kParts; ++part) {
            ldmatrix_transposed(f.x[part], address + part * kPart * static_cast<int>(sizeof(Element)));
        }
        return f;
    }
};

// 16 rows of such a matrix, `row` the first of them, as a warp writes them; its parts lie `part` elements apart.
template <class Op, int kColumns>
struct BlockedRows {
    using Element = typename Op::Element;
    Element* at;
    std::int64_t part;

    __device__ __forceinline__ BlockedRows(Element* matrix, int row, std::int64_t part_elements)
        : at(matrix + row * kColumns + static_cast<int>(threadIdx.x % 32) * 2), part(part_elements) {}

    // Columns 16 k .. 16 k + 15, held as an A fragment.
    __device__ __forceinline__ void set_fragment(int k, const Fragment<Op>& f) const {
#pragma unroll
        for (int block = 0; block < 4; ++block) set(block % 2, 2 * k + block / 2, f.pair(block));
    }

    // The lane's pair of the 8x8 block at (8 half, 8 n): rows and columns as in an accumulator.
    __device__ __forceinline__ void set(int half, int n, const Pair<Op>& pair) const {
#pragma unroll
        for (int p = 0; p < Op::kParts; ++p) {
            *reinterpret_cast<std::uint32_t*>(at + p * part + (half * (kColumns / 8) + n) * 64) = pair.part[p];
        }
    }
};

// Copies a tile from a matrix whose parts lie `part` elements apart, in the background.
template <int kThreads, class Op, int kRows, int kColumns>
__device__ __forceinline__ void fill_blocked(BlockedTile<Op, kRows, kColumns>& tile, const typename Op::Element* from,
                                             std::int64_t part) {
    using Tile = BlockedTile<Op, kRows, kColumns>;
#pragma unroll
    for (int p = 0; p < Op::kParts; ++p) {
        copy_record<kThreads, 2 * Tile::kPart>(tile.x + p * Tile::kPart, from + p * part);
    }
}

}  // namespace flashqla::cuda
