// Copies accepted states from the intermediate buffer into the pool.
#pragma once

#include <cstdint>

#include "base/call.hpp"

namespace flashqla::cuda::sm80 {

inline constexpr int kCommitThreads = 128;
inline constexpr int kCommitElements = 4096;  // of a state that a block copies

// `parts`: blocks for each (row, value head), enough for the whole state.
Status launch_commit(const CommitCall& call, std::uint32_t parts, std::uint32_t blocks, int device,
                     Stream stream) noexcept;

}  // namespace flashqla::cuda::sm80
