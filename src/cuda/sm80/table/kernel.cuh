// One block, whose time every call waits for: code that runs once takes as long as its bytes take to come, so there is
// little of it, and what can be done by many lanes at a time is. A thread has a sequence at a time for the sums; for
// the choice a warp has a candidate at a time for the counts, then a launch and a lane each candidate.
#pragma once

#include "cuda/device/arrivals.cuh"
#include "cuda/device/chunks.cuh"
#include "cuda/device/gates.cuh"
#include "cuda/device/grid_order.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/sm80/table/params.hpp"

namespace flashqla::cuda::sm80 {

inline constexpr int kTableThreads = 512;

struct TableShared {
    static constexpr int kWarps = kTableThreads / 32;
    static constexpr std::int64_t kLengths = 256;
    std::uint32_t length[kLengths];  // chunks of the first sequences, nearly always of all
    std::uint32_t longest[kWarps];
    std::int64_t chunks[kWarps], segments[kWarps];  // sums
    SegmentCounts counts[SegmentModel::kCandidates];
    // With windows, all carried: of each walk, candidates last; and of everything.
    float walks[2][SegmentCosts::kAllLaunches][SegmentModel::kCandidates];
    float time[2][SegmentModel::kCandidates];
    std::uint32_t launches[2][SegmentModel::kCandidates];
    SegmentChoice choice;
    std::uint32_t forgetful, warm;  // as in SegmentCounts
    std::uint32_t cut;              // sequences that are written as cut
};

// Chunks of a sequence.
__device__ __forceinline__ std::uint32_t length_of(const TableParams& params, std::int64_t n) {
    // NOTE: a division of 64 bits takes a hundred instructions; the tokens of a call are fewer than 2^31.
    const auto each = static_cast<std::uint32_t>(params.chunk);
    return (static_cast<std::uint32_t>(clamped_span(params.in, n).length) + each - 1) / each;
}
__device__ __forceinline__ std::uint32_t length_of(const TableParams& params, const TableShared& shared,
                                                   std::int64_t n) {
    return n < TableShared::kLengths ? shared.length[n] : length_of(params, n);
}

// What the gates at some tokens say of the others: how many chunks each head would need before a cut. Only the choice
// rests on it; what a cut needs is found out where it is made (sm90/forward/windows.cuh).
//
// A lane has a token, somewhere in its thirty-second of all tokens: at even distances they would all see the same gate
// where gates repeat. A warp has some heads at a time. NOTE: tokens past the last sequence may hold anything; they are
// asked for all the same, so that no load waits for another.
class GuessedWindows {
    static constexpr int kWarps = kTableThreads / 32, kAtOnce = 2;

public:
    __device__ __forceinline__ explicit GuessedWindows(const TableParams& params)
        : params_(params), token_(token_of(params.in.problem.tokens, threadIdx.x % 32)) {
        if (asked()) load(threadIdx.x / 32);
    }

    // Adds the windows of all heads; `used` tokens are those of sequences.
    __device__ __forceinline__ void add_to(TableShared& shared, std::int64_t used) {
        if (!asked()) return;
        const auto warp = static_cast<std::int32_t>(threadIdx.x / 32);
        const bool counts = token_ < used;
        const auto samples = static_cast<float>(__popc(__ballot_sync(kFullWarp, counts)));
#pragma unroll 1
        for (std::int32_t first = warp; first < params_.in.problem.heads_v; first += kAtOnce * kWarps) {
            if (first != warp) load(first);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const std::int32_t head = first + i * kWarps;
                if (head >= params_.in.problem.heads_v) break;
                const float g = counts ? HeadGate(params_.in, head).log_decay(params_.in, bits_[i]) : 0.0f;
                const float chunk = warp_sum(g) / samples * static_cast<float>(params_.chunk);
                const float window = chunk < 0 ? ceilf(kForgotten / chunk) : 0.0f;
                if (threadIdx.x % 32 == 0 && window > 0 && window <= static_cast<float>(params_.costs.most_window)) {
                    atomicAdd(&shared.forgetful, 1u);
                    atomicAdd(&shared.warm, static_cast<std::uint32_t>(window));
                }
            }
        }
    }

private:
    // The fractions of multiples of the golden ratio are as irregular as numbers can be. Tokens are fewer than 2^31.
    static __device__ __forceinline__ std::int64_t token_of(std::int64_t tokens, unsigned lane) {
        constexpr std::uint32_t kRatio = 40503;  // of 2^16
        const std::uint32_t place = (lane << 16) + ((lane * kRatio + kRatio / 2) & 0xffff);
        return tokens * place >> 21;
    }
    __device__ __forceinline__ bool asked() const {
        return params_.states.windows && params_.in.g && params_.in.problem.tokens > 0;
    }
    __device__ __forceinline__ void load(std::int32_t first) {
        const Inputs& in = params_.in;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const std::int32_t head = min(first + i * kWarps, in.problem.heads_v - 1);
            bits_[i] = load_bits(in.g.data, in.g.dtype, in.g.offset(0, token_, head));
        }
    }

    const TableParams& params_;
    const std::int64_t token_;
    std::uint32_t bits_[kAtOnce] = {};
};

// What a candidate makes of all sequences, by a warp.
__device__ __forceinline__ void count(const TableParams& params, TableShared& shared, std::uint32_t chunks,
                                      std::uint32_t longest, int candidate) {
    const std::int32_t each = SegmentModel::segment_chunks(params.costs, longest, candidate);
    SegmentCounts counts;
#pragma unroll 1
    for (std::int64_t n = threadIdx.x % 32; n < params.in.count; n += 32) {
        counts.add(1, length_of(params, shared, n), static_cast<std::uint32_t>(each));
    }
    counts.forgetful = shared.forgetful;
    counts.warm = shared.warm;
    counts.chunks = chunks;
    counts.longest = longest;
    counts.segments = warp_sum(counts.segments);
    counts.full = warp_sum(counts.full);
    counts.cuts = warp_sum(counts.cuts);
    counts.cut = warp_sum(counts.cut);
    if (threadIdx.x % 32 == 0) shared.counts[candidate] = counts;
}

// The same choice for the same lengths, whatever else runs: all sums are of integers, and of two that take the same
// time it is the one with fewer segments. Gates are looked at in the same places.
__device__ __forceinline__ void choose(const TableParams& params, TableShared& shared, std::uint32_t chunks,
                                       std::uint32_t longest) {
    const SegmentCosts& costs = params.costs;
    const auto lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll 1
    for (int candidate = warp; candidate < SegmentModel::kCandidates; candidate += TableShared::kWarps) {
        count(params, shared, chunks, longest, candidate);
    }
    __syncthreads();
    // NOTE: where multiprocessors would be idle, carrying may be done sooner than walking through chunks before the
    // cut.
    constexpr int kLaunches = SegmentCosts::kAllLaunches;
    static_assert(SegmentModel::kCandidates == 32 && TableShared::kWarps == 2 * kLaunches);
    const std::int32_t each = SegmentModel::segment_chunks(costs, longest, lane);
    SegmentCounts counts = shared.counts[lane];
    if (warp >= kLaunches) counts.forgetful = counts.warm = 0;
    const int of = warp % kLaunches;
    shared.walks[warp / kLaunches][of][lane] =
        SegmentModel::walk_time(costs, counts, each, of / SegmentCosts::kLaunches, of % SegmentCosts::kLaunches);
    __syncthreads();
    if (warp < 2) {
        if (warp == 1) counts.forgetful = counts.warm = 0;
        const auto times = [&](int walk, int launch) {
            return shared.walks[warp][SegmentCosts::kLaunches * walk + launch][lane];
        };
        shared.time[warp][lane] = SegmentModel::time_of_walks(costs, counts, each, times, shared.launches[warp][lane]);
    }
    __syncthreads();
    if (warp == 0) {
        SegmentChoice choice;
        choice.segment_chunks = each;
        choice.windows = shared.time[0][lane] < shared.time[1][lane];
        const int way = choice.windows ? 0 : 1;
        choice.launches = shared.launches[way][lane];
        float time = lane == 0 ? shared.time[way][lane] * SegmentModel::gain(params.costs) : shared.time[way][lane];
        int best = lane;
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) {
            const float other = __shfl_xor_sync(kFullWarp, time, bit);
            const int its = __shfl_xor_sync(kFullWarp, best, bit);
            if (other < time || (other == time && its < best)) time = other, best = its;
        }
        if (lane == best) shared.choice = choice;
    }
    __syncthreads();
}

// The segments of a sequence, from number `first` on.
__device__ __forceinline__ void store_records(const TableParams& params, std::int64_t n, std::int64_t first,
                                              std::uint32_t length, std::uint32_t each) {
    const Span span = clamped_span(params.in, n);
    SegmentRecord record;
    record.begin = span.begin;
    record.length = static_cast<std::int32_t>(span.length);
    record.n = static_cast<std::int32_t>(n);
#pragma unroll 1
    for (std::uint32_t done = 0; params.most_segments > first + record.index; done += each, ++record.index) {
        record.first_token = static_cast<std::int32_t>(done) * params.chunk;
        record.is_last = length - done <= each ? 1 : 0;
        record.chunks = static_cast<std::int32_t>(min(length - done, each));
        params.records[first + record.index] = record;
        if (record.is_last) break;
    }
}

// Where chunks and segments of each sequence begin, and which sequences are cut. NOTE: offsets that decrease make
// sequences overlap, and then there can be more chunks than tokens allow. Those beyond the bound are left out: they
// have no place in the workspace.
__device__ __forceinline__ void store_tables(const TableParams& params, TableShared& shared) {
    const auto lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    const std::int64_t count = params.in.count;
    const auto each = static_cast<std::uint32_t>(shared.choice.segment_chunks);
    std::int64_t chunks_before = 0, segments_before = 0;
#pragma unroll 1
    for (std::int64_t first = 0; first < count; first += kTableThreads) {
        const std::int64_t n = first + threadIdx.x;
        const std::uint32_t length = n < count ? length_of(params, shared, n) : 0;
        const std::uint32_t own = n >= count ? 0 : length > each ? (length - 1) / each + 1 : 1;
        if (own > 1 && params.cut) params.cut[atomicAdd(&shared.cut, 1u)] = static_cast<std::int32_t>(n);
        std::int64_t chunks = length, segments = own;  // up to and with this one
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const std::int64_t c = __shfl_up_sync(kFullWarp, chunks, step);
            const std::int64_t s = __shfl_up_sync(kFullWarp, segments, step);
            if (lane >= step) chunks += c, segments += s;
        }
        const int warps = static_cast<int>(min(count - first + 31, std::int64_t(kTableThreads)) / 32);
        if (lane == 31) shared.chunks[warp] = chunks, shared.segments[warp] = segments;
        __syncthreads();
        std::int64_t chunks_now = chunks_before, segments_now = segments_before;
#pragma unroll 1
        for (int i = 0; i < warps; ++i) {
            if (i < warp) chunks_now += shared.chunks[i], segments_now += shared.segments[i];
            chunks_before += shared.chunks[i];
            segments_before += shared.segments[i];
        }
        if (n < count) {
            params.chunks[n] = static_cast<std::int32_t>(clamp(chunks_now + chunks - length, 0, params.most_chunks));
            params.segments[n] =
                static_cast<std::int32_t>(clamp(segments_now + segments - own, 0, params.most_segments));
            if (params.records) store_records(params, n, segments_now + segments - own, length, each);
        }
        __syncthreads();
    }
    const auto all = static_cast<std::int32_t>(clamp(segments_before, 0, params.most_segments));
    if (threadIdx.x == 0) {
        params.chunks[count] = static_cast<std::int32_t>(clamp(chunks_before, 0, params.most_chunks));
        params.segments[count] = all;
        SegmentChoice choice = shared.choice;
        choice.segments = all;
        choice.cut = static_cast<std::int32_t>(shared.cut);
        *params.choice = choice;
    }
    if (shared.cut == 0 || !params.states.stored_ends) return;
    const std::int64_t rows = std::int64_t(all) * params.in.problem.heads_v;
#pragma unroll 1
    for (std::int64_t i = threadIdx.x; i < rows; i += kTableThreads) {
        params.states.stored_ends[i] = params.states.stored_starts[i] = 0;
        if (params.states.windows) params.states.windows[i] = kUnknown;
    }
}

__global__ void __launch_bounds__(kTableThreads, 1) table_kernel(const __grid_constant__ TableParams params) {
    auto& shared = shared_block<TableShared>();
    if (threadIdx.x == 0) shared.forgetful = shared.warm = shared.cut = 0;
    wait_for_earlier_grids();
    if (params.taken) let_next_grid_start();  // NOTE: only where one block a multiprocessor comes next
    if (params.taken && threadIdx.x < kTakenCounts) params.taken[threadIdx.x] = 0;
    __syncthreads();
    GuessedWindows guessed(params);
    const std::int64_t used = clamped_used_tokens(params.in);
    std::uint32_t longest = 1, chunks = 0;
#pragma unroll 1
    for (std::int64_t n = threadIdx.x; n < params.in.count; n += kTableThreads) {
        const std::uint32_t length = length_of(params, n);
        longest = max(longest, length);
        chunks += length;
        if (n < TableShared::kLengths) shared.length[n] = length;
    }
    guessed.add_to(shared, used);
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) longest = max(longest, __shfl_xor_sync(kFullWarp, longest, bit));
    chunks = warp_sum(chunks);
    if (threadIdx.x % 32 == 0) {
        shared.longest[threadIdx.x / 32] = longest;
        shared.chunks[threadIdx.x / 32] = chunks;
    }
    __syncthreads();
    chunks = 0;
#pragma unroll
    for (int i = 0; i < TableShared::kWarps; ++i) {
        longest = max(longest, shared.longest[i]);
        chunks += static_cast<std::uint32_t>(shared.chunks[i]);
    }
    choose(params, shared, chunks, longest);
    store_tables(params, shared);
}

}  // namespace flashqla::cuda::sm80
