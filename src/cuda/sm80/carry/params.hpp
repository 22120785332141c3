// The states at the cuts between segments, one after the other: start_(s+1) = end_s + M_s start_s, in fp32. Gradients
// of the state go the other way through the same matrices: D_end_(s-1) = D*_s + M_s^T D_end_s.
#pragma once

#include <cstdint>

#include "base/call.hpp"
#include "cuda/chunks.hpp"
#include "cuda/sm80/chunk/params.hpp"

namespace flashqla::cuda::sm80 {

inline constexpr int kCarryRows = 16;  // columns of V of a block

// fp32, D^T row by row [segments][Hv][V][K].
struct SegmentAdjoints {
    float* starts = nullptr;  // D* of the state that enters a segment, all but the first of their sequence
    float* ends = nullptr;    // D of the state that leaves a segment, all but the last of their sequence
};

struct CarryParams {
    Inputs in;
    ChunkTable table;
    SegmentStates states;
    SegmentAdjoints adjoints;  // given: they are carried, with the transitions of `states`, and not the states
};

Status launch_carry(const char* function, const CarryParams& params, int device, Stream stream) noexcept;

}  // namespace flashqla::cuda::sm80
