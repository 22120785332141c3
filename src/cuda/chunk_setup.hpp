// What every chunked pass begins with: how many chunks and segments there can be, where they lie, and the results of
// the prepare kernel. Everything from bounds; lengths stay on the device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/backend.hpp"
#include "cuda/chunks.hpp"

namespace flashqla::cuda {

// N, whether the call is packed or not.
std::int64_t sequences_of(const Problem& problem) noexcept;

// Blocks that zero outputs past the last sequence: none unless packed, and no more than are worth their start.
std::uint32_t zero_blocks_of(const Problem& problem) noexcept;

class ChunkSetup {
public:
    // Books the workspace. `segment_chunks`: chunks of a segment, at least 1; more than any sequence has = no split.
    ChunkSetup(const Problem& problem, std::int32_t device, std::int64_t segment_chunks, WorkspaceLayout& workspace);

    std::int64_t chunks() const noexcept { return chunks_; }  // upper bounds
    std::int64_t segments() const noexcept { return segments_; }
    // Whether a sequence can have more than one segment.
    bool split() const noexcept { return split_; }
    std::int32_t chunk() const noexcept { return chunk_; }  // tokens
    std::int32_t segment_chunks() const noexcept { return segment_chunks_; }

    ChunkTable table(std::byte* workspace) const noexcept;
    // PreparedChunk [chunks][Hv]
    void* prepared(std::byte* workspace) const noexcept { return prepared_.in(workspace); }
    // Launches the table kernel (packed calls) and the prepare kernel.
    Status prepare(const char* function, const Inputs& in, std::byte* workspace, Stream stream) const noexcept;

private:
    std::int32_t device_, chunk_, segment_chunks_ = 1, share_ = 1;
    std::int64_t chunks_ = 0, segments_ = 0;
    bool packed_, split_ = false;
    Booking<std::int32_t> chunk_table_, segment_table_;
    Booking<std::byte> prepared_;
};

}  // namespace flashqla::cuda
