// What every chunked pass begins with: how many chunks and segments there can be, where they lie, and the results of
// the prepare kernel. Everything from bounds; lengths stay on the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/backend.hpp"
#include "cuda/chunk_params.hpp"
#include "cuda/chunks.hpp"
#include "cuda/segment_cost.hpp"

namespace flashqla::cuda {

// N, whether the call is packed or not.
std::int64_t sequences_of(const Problem& problem) noexcept;

// Blocks that zero outputs past the last sequence: none unless packed, and no more than are worth their start.
std::uint32_t zero_blocks_of(const Problem& problem) noexcept;

// How sequences are cut: decided here when all have the same length, or when the options say it, else by the table
// kernel within bounds.
struct SegmentPlan {
    SegmentCosts costs;          // least and most filled in, and only launches that may be chosen
    std::uint32_t launches = 0;  // those that may be needed; a call of one length needs all of them
    bool split = false;          // whether a sequence can have more than one segment
    bool on_device = false;      // how long segments are is known there

    // `costs`: everything but least and most.
    SegmentPlan(const Problem& problem, const PlanOptions& options, const SegmentCosts& costs);

    bool may(int walk, int launch) const noexcept { return (launches & SegmentCosts::bit(walk, launch)) != 0; }
    // "sequences in one piece", "segments of ..."
    std::string explain() const;
};

class ChunkSetup {
public:
    // Books the workspace. `together`: one kernel does everything behind the table (ChunkFamily); else chunks are
    // prepared by a kernel of their own.
    ChunkSetup(const Problem& problem, std::int32_t device, const SegmentPlan& plan, bool together,
               WorkspaceLayout& workspace);

    std::int64_t chunks() const noexcept { return chunks_; }  // upper bounds
    std::int64_t segments() const noexcept { return segments_; }
    std::int32_t chunk() const noexcept { return chunk_; }  // tokens

    ChunkTable table(std::byte* workspace) const noexcept;
    // For one of the launches of a walk, or for what needs any of them.
    ChunkTable table(std::byte* workspace, int walk, int launch) const noexcept;
    ChunkTable table(std::byte* workspace, int walk) const noexcept;
    // Of SegmentStates what the table kernel clears; null where not everything is together, or nothing is cut.
    SegmentStates states(std::byte* workspace) const noexcept;
    // PreparedChunk [chunks][Hv]
    void* prepared(std::byte* workspace) const noexcept { return prepared_.in(workspace); }
    // Whether the table kernel says where chunks and segments lie.
    bool tabled() const noexcept { return tabled_; }
    // Launches the table kernel, if there is a table, and, if there are records, the prepare kernel.
    Status prepare(const char* function, const Inputs& in, std::byte* workspace, Stream stream) const noexcept;

private:
    std::int32_t device_, chunk_, segment_chunks_ = 1, share_ = 1;
    SegmentCosts costs_;
    std::int64_t chunks_ = 0, segments_ = 0;
    bool together_, split_, tabled_;
    Booking<std::int32_t> chunk_table_, segment_table_, cut_, windows_;
    Booking<SegmentChoice> choice_;
    Booking<SegmentRecord> segment_records_;
    Booking<std::uint32_t> taken_, stored_ends_, stored_starts_;
    Booking<std::byte> prepared_;
};

}  // namespace flashqla::cuda
