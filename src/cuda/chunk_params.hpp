// What a plan hands to the kernels that take a state through the chunks of a segment: for outputs, final states and
// checkpoints; or for what a segment does to the state (its end from zeros, and its transition); or for the state that
// enters each chunk, for the backward pass.
#pragma once

#include <cstdint>

#include "base/call.hpp"
#include "cuda/chunks.hpp"

namespace flashqla::cuda {

enum class ChunkMode : std::int32_t {
    outputs = 0,  // o, final_state, checkpoints
    ends = 1,     // the state that leaves each segment but the last of a sequence, and the segment's transition
    history = 2,  // the state that enters each chunk, and the deltas of its tokens
};

// f.template operator()<mode>(), for a launch.
template <class F>
Status with_mode(ChunkMode mode, F&& f) noexcept {
    switch (mode) {
        case ChunkMode::ends: return f.template operator()<ChunkMode::ends>();
        case ChunkMode::history: return f.template operator()<ChunkMode::history>();
        default: return f.template operator()<ChunkMode::outputs>();
    }
}

// How far back the state at a cut depends on what came before.
//
// A token takes a state S to exp(g) (I - beta k k^T) S and adds to it, so that what S held keeps at most
// exp(g) max(1, |1 - beta k.k|) of its norm. Where the product of that over the chunks before a cut is below
// exp(kForgotten), the state there is what these chunks make of zeros, but for that share of the state that they do not
// see. Keys need not be unit, nor beta below 2: whatever makes a state larger counts against the gates.
inline constexpr float kForgotten = -20.8f;  // the logarithm of 2^-30
// Chunks looked at. More would cost as much as the exact way, which takes a segment three times.
inline constexpr int kMostWindow = 12;
inline constexpr std::int32_t kWholePast = -1;

// fp32, S^T or M^T row by row: [segments][Hv][rows][K]. A segment's end has dim_v rows of S* (the true end for the
// first segment of a sequence, from zeros for the others), then dim_k rows of M^T; where one kernel does everything M^T
// is padded (sm90/forward/params.hpp).
struct SegmentStates {
    // [segments][Hv][V][K] of the segments that depend on their whole past; of first ones too where the final state
    // takes the place of the initial one.
    float* starts = nullptr;
    float* ends = nullptr;  // [segments][Hv][V + K][K]
    // [segments][Hv] of the segments that are not the first of their sequence: how many chunks before it make its start
    // state from zeros, or kWholePast (sm90/forward/windows.cuh). Null: kWholePast everywhere.
    std::int32_t* windows = nullptr;
    // [segments][Hv], zeroed before: columns of V, and of the transition, that are stored in `ends`; columns of V in
    // `starts`. Only where one kernel stores and reads them.
    std::uint32_t* stored_ends = nullptr;
    std::uint32_t* stored_starts = nullptr;
};

// fp32, D^T row by row [segments][Hv][V][K].
struct SegmentAdjoints {
    float* starts = nullptr;  // D* of the state that enters a segment, all but the first of their sequence
    float* ends = nullptr;    // D of the state that leaves a segment, all but the last of their sequence
};

struct ChunkParams {
    ForwardCall call;
    ChunkTable table;
    const void* from = nullptr;  // PreparedChunk [chunks][Hv]
    SegmentStates states;
    // Of the operands' type in 8x8 blocks (BlockedTile), zeros where they are padded. The deltas X^T are those before
    // `keep`.
    void* history = nullptr;  // [chunks][Hv][parts][V padded][K padded], S^T
    void* deltas = nullptr;   // [chunks][Hv][parts][V padded][chunk]
    ChunkMode mode = ChunkMode::outputs;
    std::uint32_t tiles = 1;           // of V; with ChunkMode::ends also those of the transition
    std::uint32_t segment_blocks = 0;  // blocks of segments, then some that zero the tail of o
    std::uint32_t zero_blocks = 0;
    std::int32_t columns = 64;  // of V of a block: 64, or 128 for up to 128 keys of 16 bits
    std::int32_t stages = 1;    // chunks in shared memory at a time; 2 hides the loads
};

}  // namespace flashqla::cuda
