// The prefix sums of chunks and segments over the sequences of a packed call, and how long its segments are.
#pragma once

#include <cstdint>

#include "base/call.hpp"
#include "cuda/segment_cost.hpp"

namespace flashqla::cuda::sm80 {

struct TableParams {
    Inputs in;
    std::int32_t chunk = 64;                          // tokens
    SegmentCosts costs;                               // what to choose by
    std::int32_t* chunks = nullptr;                   // [N+1]
    std::int32_t* segments = nullptr;                 // [N+1]
    SegmentChoice* choice = nullptr;                  // [1]
    std::uint32_t* taken = nullptr;                   // [launches], becomes 0 (ChunkTable)
    std::int64_t most_chunks = 0, most_segments = 0;  // what the workspace and the grids are made for
};

Status launch_table(const char* function, const TableParams& params, int device, Stream stream) noexcept;

}  // namespace flashqla::cuda::sm80
