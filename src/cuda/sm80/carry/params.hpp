// The states at the cuts between segments, one after the other: start_(s+1) = end_s + M_s start_s, in fp32. Gradients
// of the state go the other way through the same matrices: D_end_(s-1) = D*_s + M_s^T D_end_s.
#pragma once

#include <cstdint>

#include "base/call.hpp"
#include "cuda/chunks.hpp"
#include "cuda/sm80/chunk/params.hpp"

namespace flashqla::cuda::sm80 {

struct CarryParams {
    Inputs in;
    ChunkTable table;
    SegmentStates states;
    // Given: they are carried, with the transitions of `states`, and not the states.
    SegmentAdjoints adjoints;
    // Set by launch_carry: a sequence, a head and some columns each, and the blocks that share them.
    std::uint32_t items = 0, blocks = 0;
};

// Columns of V of a block: as many blocks as one sequence keeps busy, for it is rarely more than one that is cut often.
constexpr int carry_rows(const Problem& p, int multiprocessors) noexcept {
    return p.heads_v * pieces(p.dim_v, 8) <= multiprocessors ? 8 : 16;
}
// The share of the GPU that carrying one sequence takes.
constexpr float carry_share(const Problem& p, int multiprocessors) noexcept {
    return static_cast<float>(p.heads_v * pieces(p.dim_v, carry_rows(p, multiprocessors))) /
           static_cast<float>(multiprocessors);
}

Status launch_carry(const char* function, CarryParams params, int device, Stream stream) noexcept;

}  // namespace flashqla::cuda::sm80
