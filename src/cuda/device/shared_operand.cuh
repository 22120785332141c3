// How wgmma is told where an operand lies in shared memory.
#pragma once

#include <cstdint>

namespace flashqla::cuda {

// Where an operand lies in shared memory: its address in units of 16 bytes; the two strides, of which the layout says
// what they mean; the swizzle. Halves of 32 bits, of which only the lower one is not a constant.
struct SharedOperand {
    std::uint32_t low, high;

    static __device__ __forceinline__ SharedOperand of(std::uint32_t address, std::uint32_t leading,
                                                       std::uint32_t stride, bool swizzled) {
        return {(address & 0x3ffff) >> 4 | leading >> 4 << 16, stride >> 4 | (swizzled ? 1u << 30 : 0u)};
    }
    // The operand that lies so many bytes further on.
    __device__ __forceinline__ SharedOperand plus(std::uint32_t bytes) const { return {low + (bytes >> 4), high}; }
    __device__ __forceinline__ std::uint64_t bits() const { return static_cast<std::uint64_t>(high) << 32 | low; }
};

// Whether rows of an operand in shared memory run along k (as for B[k][n] = x[n][k]) or across it (B[k][n] = x[k][n]).
enum class Rows { along_k = 0, across_k = 1 };

}  // namespace flashqla::cuda
