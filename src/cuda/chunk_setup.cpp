#include "cuda/chunk_setup.hpp"

#include <algorithm>

#include "cuda/host/device.hpp"
#include "cuda/sm80/prepare/params.hpp"
#include "cuda/sm80/table/params.hpp"

namespace flashqla::cuda {

std::int64_t sequences_of(const Problem& p) noexcept { return p.sequences > 0 ? p.sequences : p.batch; }

std::uint32_t zero_blocks_of(const Problem& p) noexcept {
    constexpr double kElements = 64 << 10, kMost = 512;  // elements of o that are worth a block, blocks
    if (p.sequences == 0 || p.tokens == 0) return 0;     // only packed tokens can lie past the last sequence
    // NOTE: double, because sizes that no backend takes come this far, and their product may not fit.
    const double elements = static_cast<double>(p.tokens) * p.heads_v * p.dim_v;
    return static_cast<std::uint32_t>(std::min(1 + elements / kElements, kMost));
}

ChunkSetup::ChunkSetup(const Problem& p, std::int32_t device, std::int64_t segment_chunks, WorkspaceLayout& workspace)
    : device_(device), chunk_(sm80::chunk_tokens(p)), packed_(p.sequences > 0) {
    const std::int64_t longest = pieces(p.tokens, chunk_), n = sequences_of(p);
    segment_chunks_ =
        static_cast<std::int32_t>(std::clamp<std::int64_t>(segment_chunks, 1, std::max<std::int64_t>(longest, 1)));
    split_ = longest > segment_chunks_;
    if (packed_) {
        // A sequence has at most one chunk that is not full, and one segment.
        chunks_ = p.tokens / chunk_ + std::min(n, p.tokens);
        segments_ = (split_ ? chunks_ / segment_chunks_ : 0) + n;
        const auto entries = static_cast<std::size_t>(n + 1);
        chunk_table_ = workspace.book<std::int32_t>("first chunk of each sequence", entries);
        segment_table_ = workspace.book<std::int32_t>("first segment of each sequence", entries);
    } else {
        chunks_ = n * longest;
        segments_ = n * std::max<std::int64_t>(1, pieces(longest, segment_chunks_));
    }
    // A block may take its whole group, whose products it then computes once, or share it with others while
    // multiprocessors would be idle.
    constexpr std::int64_t kBlocksEach = 4;
    const std::int64_t group = p.heads_v / p.heads_k, blocks = std::max<std::int64_t>(1, chunks_ * p.heads_k);
    const std::int64_t room = kBlocksEach * gpus().list[static_cast<std::size_t>(device)].multiprocessors;
    share_ = static_cast<std::int32_t>(pieces(group, std::clamp<std::int64_t>(room / blocks, 1, group)));
    const auto each = static_cast<std::size_t>(chunks_) * static_cast<std::size_t>(p.heads_v);
    prepared_ = workspace.book<std::byte>("prepared chunks (chunks, Hv)", each * sm80::prepared_bytes(p));
}

ChunkTable ChunkSetup::table(std::byte* workspace) const noexcept {
    ChunkTable table;
    if (packed_) {
        table.chunks = chunk_table_.in(workspace);
        table.segments = segment_table_.in(workspace);
    }
    table.chunk = chunk_;
    table.segment_chunks = segment_chunks_;
    return table;
}

Status ChunkSetup::prepare(const char* function, const Inputs& in, std::byte* workspace, Stream stream) const noexcept {
    if (packed_) {
        const sm80::TableParams params{
            in, chunk_, segment_chunks_, chunk_table_.in(workspace), segment_table_.in(workspace), chunks_, segments_};
        if (Status status = sm80::launch_table(function, params, device_, stream); !status.ok()) return status;
    }
    sm80::PrepareParams params{in, table(workspace), prepared(workspace), share_};
    return sm80::launch_prepare(function, params, chunks_, device_, stream);
}

}  // namespace flashqla::cuda
