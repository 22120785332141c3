// The gradient of the state on its way back through the chunks of each sequence.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/call.hpp"
#include "cuda/chunks.hpp"
#include "cuda/sm80/carry/params.hpp"
#include "cuda/sm80/prepare/params.hpp"

namespace flashqla::cuda::sm80 {

struct AdjointParams {
    BackwardCall call;
    ChunkTable table;
    const void* prepared = nullptr;  // PreparedChunk [chunks][Hv]
    // In the operands' type and 8x8 blocks (BlockedTile), V and K padded, zeros in the padding.
    void* adjoints = nullptr;   // D^T of the state that leaves each chunk [chunks][Hv][parts][V][K]
    void* residuals = nullptr;  // W'^T [chunks][Hv][parts][V][chunk]
    SegmentAdjoints segments;   // with a split; the ends are read unless `only_starts`
    bool only_starts = false;   // only D* of every segment but the first, from a zero end; no outputs
    std::uint32_t tiles = 1;    // of V
    std::uint32_t blocks = 0;   // a segment, a value head and a tile each
    std::int32_t columns = 64;  // of V of a block
    std::int32_t stages = 1;    // chunks in shared memory at a time
    std::int32_t split = 1;     // parts of K, a warp each, that share 16 columns of V
};

// Whether there is a kernel that splits K in two.
constexpr bool can_split_keys(const Problem& p) noexcept { return p.io != DType::f32 && chunk_width(p.dim_k) == 128; }

// Shared memory of a block with that many stages.
std::size_t adjoint_shared_bytes(const Problem& problem, int split, int stages) noexcept;

Status launch_adjoints(const char* function, const AdjointParams& params, int device, Stream stream) noexcept;

}  // namespace flashqla::cuda::sm80
