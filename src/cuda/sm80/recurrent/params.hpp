// The token recurrence on the device: forward, decode and verification of any length, every option of the contract.
#pragma once

#include <cstdint>

#include "base/call.hpp"

namespace flashqla::cuda::sm80 {

// How the blocks of a launch are used: first one for each (sequence, value head, tile of V columns), tiles fastest,
// then some that fill the rows of o past the last sequence with zeros.
struct RecurrentGrid {
    std::uint32_t tiles = 1;
    std::uint32_t state_blocks = 0;
    std::uint32_t zero_blocks = 0;
};

// The size of K that a kernel is made for: 64, 128 or 256.
constexpr int recurrent_width(std::int32_t dim_k) noexcept { return dim_k <= 64 ? 64 : dim_k <= 128 ? 128 : 256; }

// State elements that a block keeps in registers; the fewer the keys, the more columns.
inline constexpr int kRecurrentElements = 4096;
constexpr int recurrent_columns(std::int32_t dim_k) noexcept { return kRecurrentElements / recurrent_width(dim_k); }

Status launch_recurrent(const ForwardCall& call, const RecurrentGrid& grid, int device, Stream stream) noexcept;
Status launch_recurrent(const DecodeCall& call, const RecurrentGrid& grid, int device, Stream stream) noexcept;

}  // namespace flashqla::cuda::sm80
