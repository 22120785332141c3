// Matrices in shared memory as B operands of wgmma (src/cuda/device/wgmma.cuh), which ldmatrix can read too.
#pragma once

#include <cstdint>

#include "cuda/device/blocked_tile.cuh"
#include "cuda/device/operand.cuh"
#include "cuda/device/pipeline.cuh"
#include "cuda/device/wgmma.cuh"

namespace flashqla::cuda {

// kRows x kColumns as panels of 64 columns: rows of 128 bytes, whose 16-byte pieces are permuted by the row, so that
// neither rows nor columns lie in one bank.
template <class Op_, int kRows_, int kColumns_>
struct SwizzledTile {
    using Op = Op_;
    using Element = typename Op::Element;
    static constexpr int kRows = kRows_, kColumns = kColumns_, kRowBytes = 128, kPanelBytes = kRows * kRowBytes;
    static_assert(kColumns % 64 == 0 && kRows % 16 == 0 && Op::kParts == 1);

    alignas(1024) Element x[kRows * kColumns];

    // Bytes from the tile's beginning; rows that are a multiple of 8 apart lie that many kRowBytes apart.
    static __device__ __forceinline__ int offset(int row, int column) {
        return column / 64 * kPanelBytes + row * kRowBytes + ((column % 64 / 8) ^ (row % 8)) * 16 + column % 8 * 2;
    }

    // Operands from k0 on, made of one that was.
    struct AlongK {  // B[k][n] = tile[n][k0 + k]
        SharedOperand first;
        __device__ __forceinline__ SharedOperand operator()(int k0) const {
            return first.plus(k0 / 64 * kPanelBytes + k0 % 64 * 2);
        }
    };
    struct AcrossK {  // B[k][n] = tile[k0 + k][n]
        SharedOperand first;
        __device__ __forceinline__ SharedOperand operator()(int k0) const { return first.plus(k0 * kRowBytes); }
    };
    __device__ __forceinline__ AlongK along_k() const {
        return {SharedOperand::of(uniform(shared_address(x)), 16, 1024, true)};
    }
    __device__ __forceinline__ AcrossK across_k() const {
        return {SharedOperand::of(uniform(shared_address(x)), kPanelBytes, 1024, true)};
    }
    // The same of the tile that lies so many bytes further on, a uniform number, where the compiler knows this one's
    // place.
    __device__ __forceinline__ AlongK along_k(std::uint32_t further) const {
        return {SharedOperand::of(shared_address(x), 16, 1024, true).plus(further)};
    }
    __device__ __forceinline__ AcrossK across_k(std::uint32_t further) const {
        return {SharedOperand::of(shared_address(x), kPanelBytes, 1024, true).plus(further)};
    }
    // B[k][n] = tile[n0 + n][k0 + k]; made of along_k().
    static __device__ __forceinline__ SharedOperand part(AlongK all, int n0, int k0) {
        return all(k0).plus(n0 * kRowBytes);
    }
    // B[k][n] = tile[n'][k0 + k], n' the rows of every second block of 8, from block `first` on.
    __device__ __forceinline__ AlongK along_k_by_two(int first) const {
        return {SharedOperand::of(uniform(shared_address(x)), 16, 2048, true).plus(first * 1024)};
    }
    // B[k][n] = tile[k0 + k][n0 + n], columns of one panel.
    __device__ __forceinline__ AcrossK across_k_from(int n0) const {
        return {across_k().first.plus(n0 / 64 * kPanelBytes + n0 % 64 * 2)};
    }
    // A[m][k] = tile[m0 + m][k0 + k], as a warp's fragment.
    __device__ __forceinline__ Fragment<Op> a(int m0, int k0) const {
        const int lane = static_cast<int>(threadIdx.x % 32);
        Fragment<Op> f;
        ldmatrix(f.x[0], shared_address(x) + offset(m0 + lane % 16, k0 + lane / 16 * 8));
        return f;
    }
    // A[m][k] = tile[k0 + k][m0 + m], as a warp's fragment.
    __device__ __forceinline__ Fragment<Op> a_transposed(int k0, int m0) const {
        return a_transposed_at(shared_address(x) + a_transposed_place(static_cast<int>(threadIdx.x % 32), k0, m0));
    }
    // The same in two steps: the lane's bytes from the tile's beginning, to which k0 adds its kRowBytes.
    static __device__ __forceinline__ int a_transposed_place(int lane, int k0, int m0) {
        return offset(k0 + lane % 8 + lane / 16 * 8, m0 + lane / 8 % 2 * 8);
    }
    static __device__ __forceinline__ Fragment<Op> a_transposed_at(std::uint32_t address) {
        Fragment<Op> f;
        ldmatrix_transposed(f.x[0], address);
        return f;
    }

    // B[k][n] = tile[k0 + k][n0 + n], as a warp's fragment.
    __device__ __forceinline__ Fragment<Op> b(int k0, int n0) const {
        const int lane = static_cast<int>(threadIdx.x % 32);
        return a_transposed_at(shared_address(x) + offset(k0 + lane % 16, n0 + lane / 16 * 8));
    }
    // B[k][n] = tile[n0 + n][k0 + k], as a warp's fragment.
    __device__ __forceinline__ Fragment<Op> b_transposed(int n0, int k0) const {
        const int lane = static_cast<int>(threadIdx.x % 32);
        Fragment<Op> f;
        ldmatrix(f.x[0], shared_address(x) + a_transposed_place(lane, n0, k0));
        return f;
    }

    // A warp's 16x16 fragment, as A has it, to tile[row0 + ..][column0 + ..].
    __device__ __forceinline__ void put(int lane, int row0, int column0, const Fragment<Op>& f) {
        stmatrix(shared_address(x) + offset(row0 + lane % 16, column0 + lane / 16 * 8), f.x[0][0], f.x[0][1], f.x[0][2],
                 f.x[0][3]);
    }
    // Its transpose.
    __device__ __forceinline__ void put_transposed(int lane, int row0, int column0, const Fragment<Op>& f) {
        stmatrix_transposed(shared_address(x) + a_transposed_place(lane, row0, column0), f.x[0][0], f.x[0][1],
                            f.x[0][2], f.x[0][3]);
    }

    template <int kThreads>
    __device__ __forceinline__ void clear() {
        for (int i = static_cast<int>(threadIdx.x); i < kRows * kColumns / 8; i += kThreads) {
            reinterpret_cast<uint4*>(x)[i] = uint4{};
        }
    }
    __device__ __forceinline__ void set(int row, int column, Pair<Op> pair) {
        *reinterpret_cast<std::uint32_t*>(reinterpret_cast<char*>(x) + offset(row, column)) = pair.part[0];
    }
};

// B[k][n] = tile[k0 + k][n0 + n], or every kStep-th block of 8 columns of it. The same for A, with m for n.
template <int kRowOfBlocks>
struct BlockedAcrossK {
    SharedOperand first;
    __device__ __forceinline__ SharedOperand operator()(int k0) const { return first.plus(k0 / 8 * kRowOfBlocks); }
};
template <int kStep = 1, class Op, int kRows, int kColumns>
__device__ __forceinline__ BlockedAcrossK<kColumns / 8 * 128> across_k(const BlockedTile<Op, kRows, kColumns>& tile,
                                                                       int n0) {
    constexpr int kRowOfBlocks = kColumns / 8 * 128;
    const std::uint32_t address = uniform(shared_address(tile.x));
    return {SharedOperand::of(address, kRowOfBlocks, 128 * kStep, false).plus(n0 / 8 * 128)};
}

// A lower triangle of a 64x64 matrix of 16x16 blocks, of which a product takes 16 rows or 16 columns at a time as k.
// What lies above the blocks of the diagonal is never written but by clear(). 8x8 blocks have 128 bytes; eight pairs of
// them, those beside or below each other that a product's k covers, are a panel.
template <class Element, int kParts, Rows kAlong>
struct TrianglePanels {
    static constexpr int kRows = 64, kPanel = 16 * kRows, kPart = kRows * kRows;  // elements
    static constexpr int kBlocks = 10;                                            // 16x16 blocks of a triangle
    static constexpr bool kColumns = kAlong == Rows::along_k;                     // a panel has 16 columns

    alignas(128) Element x[kParts * kPart];

    // along_k: B[k][n] = matrix[n][16 panel + k]; across_k: B[k][n] = matrix[16 panel + k][n]. All of them are made of
    // one that was.
    struct Operand {
        SharedOperand first;
        __device__ __forceinline__ SharedOperand operator()(int part, int panel) const {
            return first.plus((part * kPart + panel * kPanel) * 2);
        }
    };
    __device__ __forceinline__ Operand operand() const {
        const std::uint32_t address = uniform(shared_address(x));
        return {kColumns ? SharedOperand::of(address, 128, 256, false) : SharedOperand::of(address, 1024, 128, false)};
    }

    template <int kThreads>
    __device__ __forceinline__ void clear() {
        for (int i = static_cast<int>(threadIdx.x); i < kParts * kPart / 8; i += kThreads) {
            reinterpret_cast<uint4*>(x)[i] = uint4{};
        }
    }

    // Copies from where a SharedTriangle has it, by the lanes of one warp: 16x16 blocks, row by row of the triangle,
    // one part after the other; kBytes of them. Panels of columns take a block as it comes, panels of rows each row of
    // its 8x8 blocks.
    static constexpr int kBytes = kParts * kBlocks * 512;
    __device__ __forceinline__ void copy(const Element* from, Barrier& barrier) {
        constexpr int kEach = kColumns ? 1 : 2, kPieces = kParts * kBlocks * kEach, kElements = 256 / kEach;
        const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
        for (int i = 0; i < kPieces; i += 32) {
            const int piece = i + lane, block = piece / kEach % kBlocks, part = piece / kEach / kBlocks;
            const int row = block >= 6 ? 3 : block >= 3 ? 2 : block >= 1 ? 1 : 0;
            const int column = block - row * (row + 1) / 2;
            const int place =
                kColumns ? column * kPanel + row * 256 : row * kPanel + column * 128 + piece % kEach * 512;
            if (i + 32 <= kPieces || piece < kPieces) {
                copy_bulk(x + part * kPart + place, from + piece * kElements, kElements * 2, barrier);
            }
        }
    }
};

}  // namespace flashqla::cuda
