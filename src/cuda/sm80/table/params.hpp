// The prefix sums of chunks and segments over the sequences of a call, and how long its segments are: chosen by the
// lengths, and by some of the gates where the state at a cut may be found without a carry (sm90/forward/windows.cuh).
#pragma once

#include <cstdint>

#include "base/call.hpp"
#include "cuda/chunk_params.hpp"
#include "cuda/segment_cost.hpp"

namespace flashqla::cuda::sm80 {

struct TableParams {
    Inputs in;
    std::int32_t chunk = 64;                          // tokens
    SegmentCosts costs;                               // what to choose by
    std::int32_t* chunks = nullptr;                   // [N+1]
    std::int32_t* segments = nullptr;                 // [N+1]
    SegmentChoice* choice = nullptr;                  // [1]
    SegmentRecord* records = nullptr;                 // [segments]; null: not asked for
    std::int32_t* cut = nullptr;                      // [N], ChunkTable::cut; null: not asked for
    std::uint32_t* taken = nullptr;                   // [kTakenCounts], becomes 0; null: there is none
    std::int64_t most_chunks = 0, most_segments = 0;  // what the workspace and the grids are made for
    // What else becomes 0 where a sequence is cut, or kUnknown (windows); null: there is none.
    SegmentStates states;
};

Status launch_table(const char* function, const TableParams& params, int device, Stream stream) noexcept;

}  // namespace flashqla::cuda::sm80
