// How far back the state at each cut between segments depends on what came before. A token takes a state S to
// exp(g) (I - beta k k^T) S and adds to it, so that what S held keeps at most exp(g) max(1, |1 - beta k.k|) of its
// norm. Where the product of that over the chunks before a cut is below kForgotten, the state there is what these
// chunks make of zeros, but for that share of the state they do not see. Keys need not be unit, nor beta below 2:
// whatever makes a state larger counts against the gates.
#pragma once

#include <cstdint>

#include "base/call.hpp"
#include "cuda/chunk_params.hpp"

namespace flashqla::cuda::sm80 {

inline constexpr float kForgotten = -20.8f;  // the logarithm of 2^-30
// Chunks looked at. More would cost as much as the exact way, which takes a segment three times.
inline constexpr int kMostWindow = 12;

struct CutsParams {
    Inputs in;
    ChunkTable table;
    std::int32_t* windows = nullptr;  // SegmentStates::windows
    std::uint32_t items = 0;          // segments and value heads, at most
};

Status launch_cuts(const char* function, const CutsParams& params, int device, Stream stream) noexcept;

}  // namespace flashqla::cuda::sm80
