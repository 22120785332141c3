// The state's way through the chunks on Hopper: what sm80's kernel does, for operands of 16 bits and up to 128 keys.
#pragma once

#include "cuda/chunk_params.hpp"

namespace flashqla::cuda::sm90 {

constexpr bool has_chunk_kernel(const Problem& p) noexcept { return p.io != DType::f32 && p.dim_k <= 128; }

// `stages` of the parameters has no meaning here.
Status launch_chunks(const char* function, const ChunkParams& params, int device, Stream stream) noexcept;

}  // namespace flashqla::cuda::sm90
