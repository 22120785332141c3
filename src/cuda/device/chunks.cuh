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
        const std::int64_t each = pieces(in.problem.tokens, table.chunk);
        chunk.n = number / each;
        first = number % each;
    }
    const Span span = clamped_span(in, chunk.n);
    chunk.batch = span.batch;
    chunk.begin = span.begin + first * table.chunk;
    chunk.tokens = static_cast<int>(clamp(span.length - first * table.chunk, 0, table.chunk));
    return chunk;
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
    if (table.segments) {
        segment.n = sequence_of(table.segments, in.count, number);
        if (segment.n < 0) return segment;
        segment.index = static_cast<std::int32_t>(number - table.segments[segment.n]);
        first = table.chunks[segment.n];
        total = table.chunks[segment.n + 1] - first;
    } else {
        total = pieces(in.problem.tokens, table.chunk);
        const std::int64_t each = total > 0 ? pieces(total, table.segment_chunks) : 1;
        segment.n = number / each;
        segment.index = static_cast<std::int32_t>(number % each);
        first = segment.n * total;
    }
    const std::int64_t skipped = std::int64_t(segment.index) * table.segment_chunks;
    segment.first_chunk = first + skipped;
    segment.first_token = skipped * table.chunk;
    segment.last = total - skipped <= table.segment_chunks;
    // Malformed offsets may promise a sequence more segments than it has chunks for.
    segment.chunks =
        static_cast<std::int32_t>(segment.last ? (total > skipped ? total - skipped : 0) : table.segment_chunks);
    return segment;
}

}  // namespace flashqla::cuda
