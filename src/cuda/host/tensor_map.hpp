// Tensors of tokens as Hopper's copy engine is told of them.
#pragma once

#include <cstdint>

#include "base/call.hpp"

namespace flashqla::cuda {

// The driver's CUtensorMap; a kernel's parameter.
struct alignas(64) TensorMap {
    std::uint64_t opaque[16];
};

// Elements of 16 bits, taken in boxes of 64 columns of 64 tokens of one head, as a panel of a SwizzledTile has them;
// what lies outside of the tensor is zero. `columns` of a row; `problem` has the tokens. False: addresses or strides
// are not what the engine can do, or the driver has no such maps.
bool make_tensor_map(TensorMap& map, const TokenRef& x, const Problem& problem, std::int32_t heads,
                     std::int32_t columns) noexcept;

}  // namespace flashqla::cuda
