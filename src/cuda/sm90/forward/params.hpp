// The forward pass on Hopper in one kernel: what prepare and chunk do one after the other, for bf16 and up to 128 keys.
#pragma once

#include "cuda/chunk_params.hpp"
#include "cuda/host/tensor_map.hpp"

namespace flashqla::cuda::sm90 {

constexpr bool has_forward_kernel(const Problem& p) noexcept {
    return p.io == DType::bf16 && p.dim_k > 64 && p.dim_k <= 128 && p.dim_v > 64;
}

// What the kernel gets besides the parameters that all walks have.
struct ForwardParams : ChunkParams {
    TensorMap q_map, k_map, v_map;
    bool mapped = false;  // else rows come element by element
};

// ChunkMode::outputs or ChunkMode::ends. A block has 128 columns; `from`, `columns` and `stages` have no meaning here.
Status launch_forward(const char* function, const ChunkParams& params, int device, Stream stream) noexcept;

}  // namespace flashqla::cuda::sm90
