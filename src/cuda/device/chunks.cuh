// The chunk or segment of a block, found on the device.
#pragma once

#include <cstdint>

#include "cuda/chunks.hpp"
#include "cuda/device/rows.cuh"

namespace flashqla::cuda {

// The sequence whose numbers include `number`, given the first number of each: found by the whole warp, 32 probes a
// step. -1: there is no such number.
__device__ __forceinline__ std::int64_t sequence_of(const std::int32_t* first, std::int64_t count,
                                                    std::int64_t number) {
    const std::int64_t lane = threadIdx.x % 32;
    std::int64_t low = 0, high = count + 1;
    while (high - low > 1) {
        const std::int64_t step = pieces(high - low, 32), at = low + lane * step;
        const bool before = at < high && first[at] <= number;
        low += (__popc(__ballot_sync(kFullWarp, before)) - 1) * step;
        high = low + step < high ? low + step : high;
    }
    return low < count ? low : -1;
}

// A chunk of a sequence: `tokens` of them from `span.begin` on (0 = there is no such chunk).
struct Chunk {
    std::int64_t n = 0;
    std::int64_t batch = 0, begin = 0;  // of the first token, in the tensors
    int tokens = 0;
};

__device__ __forceinline__ Chunk chunk_of(const Inputs& in, const ChunkTable& table, std::int64_t number) {
    std::int64_t first;
    Chunk chunk;
    if (table.chunks) {
        chunk.n = sequence_of(table.chunks, in.count, number);
        if (chunk.n < 0) return chunk;
        first = number - table.chunks[chunk.n];
    } else {
        // NOTE: grids bound both, and a division of 64 bits takes a hundred instructions.
        const auto each = static_cast<std::uint32_t>(pieces(in.problem.tokens, table.chunk));
        chunk.n = static_cast<std::uint32_t>(number) / each;
        first = static_cast<std::uint32_t>(number) % each;
    }
    const Span span = clamped_span(in, chunk.n);
    chunk.batch = span.batch;
    chunk.begin = span.begin + first * table.chunk;
    chunk.tokens = static_cast<int>(clamp(span.length - first * table.chunk, 0, table.chunk));
    return chunk;
}

__device__ __forceinline__ SegmentChoice choice_of(const ChunkTable& table) {
    return table.choice ? *table.choice : SegmentChoice{table.segment_chunks};
}

// Whether a launch has anything to do.
__device__ __forceinline__ bool is_needed(const ChunkTable& table) {
    return (choice_of(table).launches & table.launch) != 0;
}

// The segments of a sequence.
struct SegmentRange {
    std::int32_t first = 0, count = 0;
};

__device__ __forceinline__ SegmentRange segments_of(const Inputs& in, const ChunkTable& table, std::int64_t n) {
    if (table.segments) return {table.segments[n], table.segments[n + 1] - table.segments[n]};
    const std::int64_t chunks = pieces(in.problem.tokens, table.chunk);
    const auto count = static_cast<std::int32_t>(chunks > 0 ? pieces(chunks, table.segment_chunks) : 1);
    return {static_cast<std::int32_t>(n) * count, count};
}

// A run of chunks that one block walks through, `chunks` of them.
struct Segment {
    std::int64_t n = -1;           // sequence; -1: there is no such segment
    std::int64_t first_chunk = 0;  // number of its first chunk
    std::int64_t first_token = 0;  // of the sequence
    std::int32_t index = 0;        // within the sequence
    std::int32_t chunks = 0;
    bool last = true;  // the sequence ends with it
};

// NOTE: an empty sequence has one segment without chunks, so that somebody passes its state on.
__device__ __forceinline__ Segment segment_of(const Inputs& in, const ChunkTable& table, std::int64_t number) {
    Segment segment;
    std::int64_t total, first;
    const SegmentChoice choice = choice_of(table);
    if ((choice.launches & table.launch) == 0) return segment;
    if (table.segments) {
        segment.n = sequence_of(table.segments, in.count, number);
        if (segment.n < 0) return segment;
        segment.index = static_cast<std::int32_t>(number - table.segments[segment.n]);
        first = table.chunks[segment.n];
        total = table.chunks[segment.n + 1] - first;
    } else {
        total = pieces(in.problem.tokens, table.chunk);
        const auto each = static_cast<std::uint32_t>(total > 0 ? pieces(total, choice.segment_chunks) : 1);
        segment.n = static_cast<std::uint32_t>(number) / each;
        segment.index = static_cast<std::int32_t>(static_cast<std::uint32_t>(number) % each);
        first = segment.n * total;
    }
    const std::int64_t skipped = std::int64_t(segment.index) * choice.segment_chunks;
    segment.first_chunk = first + skipped;
    segment.first_token = skipped * table.chunk;
    segment.last = total - skipped <= choice.segment_chunks;
    // Malformed offsets may promise a sequence more segments than it has chunks for.
    segment.chunks =
        static_cast<std::int32_t>(segment.last ? (total > skipped ? total - skipped : 0) : choice.segment_chunks);
    return segment;
}

}  // namespace flashqla::cuda
