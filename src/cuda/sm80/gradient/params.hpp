// The gradients of q, k, g and beta: every chunk for itself, once its state and its adjoint are known.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/call.hpp"
#include "cuda/chunks.hpp"

namespace flashqla::cuda::sm80 {

// What a token's gates and beta need of its chunk. The gradient of gamma is complete but for the ends of all r and the
// chunk's whole decay, which every token before the end shares: `to_end`, added up over the chunk.
struct alignas(16) TokenGradient {
    double gamma;
    float to_end, beta;
};

struct GradientParams {
    BackwardCall call;
    ChunkTable table;
    const void* prepared = nullptr;  // PreparedChunk [chunks][Hv]
    // In the operands' type and 8x8 blocks (BlockedTile), V and K padded, zeros in the padding.
    const void* history = nullptr;    // S^T that enters each chunk [chunks][Hv][parts][V][K]
    const void* adjoints = nullptr;   // D^T of the state that leaves it, the same
    const void* deltas = nullptr;     // X^T [chunks][Hv][parts][V][chunk]
    const void* residuals = nullptr;  // W'^T, the same
    TokenGradient* tokens = nullptr;  // [chunks][Hv][chunk], for the gates kernel
    std::int32_t stages = 1;          // tiles of V in shared memory at a time
    std::int32_t columns = 64;        // of a tile of V
};

// The gradients of g and beta, a warp for each chunk and value head.
struct GatesParams {
    BackwardCall call;
    ChunkTable table;
    const TokenGradient* tokens = nullptr;
    double* d_A_log = nullptr;  // [chunks][Hv] what each chunk gives to the gradients; Gate::raw only
    double* d_dt_bias = nullptr;
    std::int64_t warps = 0;  // a bound: chunks times value heads
};

// What is left when every chunk is done: sums over chunks in a fixed order, and zeros past the last sequence.
struct FinishParams {
    BackwardCall call;
    ChunkTable table;
    const double* d_A_log = nullptr;
    const double* d_dt_bias = nullptr;
    std::uint32_t head_blocks = 0, zero_blocks = 0;
};

// How many columns of V a block takes at a time, so that it fits into shared memory of that size. 0: none does.
int gradient_columns(const Problem& problem, int shared_bytes) noexcept;
std::size_t gradient_shared_bytes(const Problem& problem, int columns, int stages) noexcept;

// One block for each of `chunks` (a bound) and key heads.
Status launch_gradients(const char* function, const GradientParams& params, std::int64_t chunks, int device,
                        Stream stream) noexcept;
Status launch_gates(const char* function, const GatesParams& params, int device, Stream stream) noexcept;
Status launch_finish(const char* function, const FinishParams& params, int device, Stream stream) noexcept;

}  // namespace flashqla::cuda::sm80
