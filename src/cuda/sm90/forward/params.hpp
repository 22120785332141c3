// The forward pass on Hopper in one kernel: what prepare and chunk do one after the other, for bf16 and up to 128 keys.
#pragma once

#include "cuda/chunk_params.hpp"
#include "cuda/host/tensor_map.hpp"

namespace flashqla::cuda::sm90 {

constexpr bool has_forward_kernel(const Problem& p) noexcept {
    return p.io == DType::bf16 && p.dim_k > 64 && p.dim_k <= 128 && p.dim_v > 64;
}

// What is counted in ChunkTable::taken.
inline constexpr int kItemsTaken = 0, kWindowsTaken = 1;

// What the kernel gets besides the parameters that all walks have.
struct ForwardParams : ChunkParams {
    std::uint32_t carry_tiles = 0;  // of V
    TensorMap q_map, k_map, v_map, o_map;
    bool mapped = false;    // else rows of q, k and v come element by element
    bool o_mapped = false;  // else outputs leave so
};

// Columns of V of a carry.
inline constexpr std::int32_t kCarryColumns = 8;
// fp32 of a segment's end (SegmentStates): S*^T [V][K], and the transition behind it, padded to 128 x 128, where a
// bulk copy may begin (TransitionBlocks).
inline constexpr std::int32_t kTransitionElements = 128 * 128;
FQLA_HOST_DEVICE constexpr std::int64_t end_state_elements(const Problem& p) noexcept {
    return pieces(std::int64_t(p.dim_v) * p.dim_k, 4) * 4;
}
FQLA_HOST_DEVICE constexpr std::int64_t end_elements(const Problem& p) noexcept {
    return end_state_elements(p) + kTransitionElements;
}

// The share of the GPU that carrying one sequence takes.
constexpr float forward_carry_share(const Problem& p, int multiprocessors) noexcept {
    return static_cast<float>(p.heads_v * pieces(p.dim_v, kCarryColumns)) / static_cast<float>(multiprocessors);
}

// Everything at once: the ends of segments and what joins them, where sequences are cut, and outputs. A block has 128
// columns; `from`, `mode`, `columns` and `stages` have no meaning here, and `tiles` and `segment_blocks` are those of
// the outputs.
Status launch_forward(const char* function, const ChunkParams& params, int device, Stream stream) noexcept;

}  // namespace flashqla::cuda::sm90
