// The state's way through the chunks of a segment.
#pragma once

#include <cstddef>

#include "cuda/chunk_params.hpp"
#include "cuda/sm80/prepare/params.hpp"

namespace flashqla::cuda::sm80 {

// Shared memory of a block with that many stages.
std::size_t chunk_shared_bytes(const Problem& problem, int columns, int stages) noexcept;
// Whether there are blocks of 128 columns for it.
constexpr bool has_wide_blocks(const Problem& p) noexcept { return p.io != DType::f32 && p.dim_k <= 128; }

Status launch_chunks(const char* function, const ChunkParams& params, int device, Stream stream) noexcept;

}  // namespace flashqla::cuda::sm80
