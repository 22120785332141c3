// The prefix sums of chunks and segments over the sequences of a call, how long its segments are, and how far back the
// state at each cut between them depends on what came before.
//
// A token takes a state S to exp(g) (I - beta k k^T) S and adds to it, so that what S held keeps at most
// exp(g) max(1, |1 - beta k.k|) of its norm. Where the product of that over the chunks before a cut is below
// kForgotten, the state there is what these chunks make of zeros, but for that share of the state that they do not see.
// Keys need not be unit, nor beta below 2: whatever makes a state larger counts against the gates.
#pragma once

#include <cstdint>

#include "base/call.hpp"
#include "cuda/chunk_params.hpp"
#include "cuda/segment_cost.hpp"

namespace flashqla::cuda::sm80 {

inline constexpr float kForgotten = -20.8f;  // the logarithm of 2^-30
// Chunks looked at. More would cost as much as the exact way, which takes a segment three times.
inline constexpr int kMostWindow = 12;
// Sequences of a call whose cuts are looked at; with more there is hardly one that is worth cutting.
inline constexpr std::int64_t kMostSequences = 256;

struct TableParams {
    Inputs in;
    std::int32_t chunk = 64;                          // tokens
    SegmentCosts costs;                               // what to choose by
    std::int32_t* chunks = nullptr;                   // [N+1]
    std::int32_t* segments = nullptr;                 // [N+1]
    SegmentChoice* choice = nullptr;                  // [1]
    std::uint32_t* taken = nullptr;                   // [launches], becomes 0 (ChunkTable)
    std::int64_t most_chunks = 0, most_segments = 0;  // what the workspace and the grids are made for
    // SegmentStates::windows, of up to kMostSequences sequences; null: not asked for.
    std::int32_t* windows = nullptr;
};

Status launch_table(const char* function, const TableParams& params, int device, Stream stream) noexcept;

}  // namespace flashqla::cuda::sm80
