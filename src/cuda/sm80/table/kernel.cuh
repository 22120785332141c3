// A thread has a sequence at a time for the sums; for the choice a warp has a candidate at a time, and a lane of the
// first two warps prices one. Then the blocks share the cuts. All blocks do the same until then, which takes no longer
// than one block alone, and the first one writes.
#pragma once

#include <cub/block/block_scan.cuh>

#include "cuda/device/chunks.cuh"
#include "cuda/device/gates.cuh"
#include "cuda/device/grid_order.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/sm80/table/params.hpp"
#include "cuda/sm80/table/windows.cuh"

namespace flashqla::cuda::sm80 {

// A candidate: what it takes, and the launches that it needs.
struct Priced {
    float time;
    std::uint32_t launches;
};

struct TableShared {
    typename cub::BlockScan<std::int64_t, kTableThreads>::TempStorage scan;
    std::uint32_t longest[kTableThreads / 32];
    // Of the first sequences, nearly always of all: chunks, the first token, the number of the first segment.
    std::uint32_t length[kMostSequences];
    std::int64_t begin[kMostSequences];
    std::int32_t segment[kMostSequences + 1];
    SegmentCounts counts[SegmentModel::kCandidates];
    Priced priced[2][SegmentModel::kCandidates];  // with windows, all carried
    SegmentChoice choice;
    std::uint32_t forgetful, warm;  // as in SegmentCounts
    WindowShared window;
};

// What the gates at some tokens, evenly spread, say of the others: how many chunks each head would need before a cut.
// Only the choice rests on it; what a cut needs is found out where it is made (windows.cuh).
//
// A lane has a token, a warp some heads at a time. NOTE: tokens past the last sequence may hold anything; they are
// asked for all the same, so that no load waits for another.
class GuessedWindows {
    static constexpr int kWarps = kTableThreads / 32, kAtOnce = 2;

public:
    __device__ __forceinline__ explicit GuessedWindows(const TableParams& params)
        : params_(params), token_(params.in.problem.tokens * (2 * (threadIdx.x % 32) + 1) / 64) {
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
    __device__ __forceinline__ bool asked() const {
        return params_.windows && params_.in.g && params_.in.problem.tokens > 0;
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

// Stores the sums of all numbers before each; they are of(n). NOTE: offsets that decrease make sequences overlap, and
// then there can be more chunks than tokens allow. Those beyond the bound are left out: they have no place in the
// workspace.
template <class Of, class Store>
__device__ __forceinline__ void each_sum(TableShared& shared, std::int64_t count, std::int64_t most, Of&& of,
                                         Store&& store) {
    std::int64_t before = 0;
#pragma unroll 1
    for (std::int64_t begin = 0; begin < count; begin += kTableThreads) {
        const std::int64_t n = begin + threadIdx.x;
        std::int64_t sum, total;
        cub::BlockScan<std::int64_t, kTableThreads>(shared.scan).ExclusiveSum(n < count ? of(n) : 0, sum, total);
        if (n < count) store(n, static_cast<std::int32_t>(clamp(before + sum, 0, most)));
        before += total;
        __syncthreads();
    }
    if (threadIdx.x == 0) store(count, static_cast<std::int32_t>(clamp(before, 0, most)));
    __syncthreads();
}

// The same choice for the same lengths, whatever else runs: all sums are of integers, and of two that take the same
// time it is the one with fewer segments. Gates are looked at in the same places.
__device__ __forceinline__ void choose(const TableParams& params, TableShared& shared, std::uint32_t chunks) {
    const SegmentCosts& costs = params.costs;
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto length = [&](std::int64_t n) {
        return n < kMostSequences ? shared.length[n]
                                  : static_cast<std::uint32_t>(params.chunks[n + 1] - params.chunks[n]);
    };
    std::uint32_t longest = 1;
    for (const std::uint32_t each : shared.longest) longest = max(longest, each);

#pragma unroll 1
    for (int candidate = warp; candidate < SegmentModel::kCandidates; candidate += kTableThreads / 32) {
        const std::int32_t each = SegmentModel::segment_chunks(costs, longest, candidate);
        SegmentCounts counts;
#pragma unroll 1
        for (std::int64_t n = lane; n < params.in.count; n += 32) counts.add(1, length(n), each);
        counts.forgetful = shared.forgetful;
        counts.warm = shared.warm;
        counts.chunks = chunks;
        counts.longest = longest;
        counts.segments = warp_sum(counts.segments);
        counts.full = warp_sum(counts.full);
        counts.cuts = warp_sum(counts.cuts);
        counts.cut = warp_sum(counts.cut);
        if (lane == 0) shared.counts[candidate] = counts;
    }
    __syncthreads();
    // NOTE: where multiprocessors would be idle, carrying may be done sooner than walking through chunks before the
    // cut.
    if (warp < 2) {
        SegmentCounts counts = shared.counts[lane];
        if (warp == 1) counts.forgetful = counts.warm = 0;
        Priced& priced = shared.priced[warp][lane];
        priced.time =
            SegmentModel::time(costs, counts, SegmentModel::segment_chunks(costs, longest, lane), priced.launches);
    }
    __syncthreads();
    if (warp == 0) {
        SegmentChoice choice;
        choice.segment_chunks = SegmentModel::segment_chunks(costs, longest, lane);
        choice.windows = shared.priced[0][lane].time < shared.priced[1][lane].time;
        const Priced& priced = shared.priced[choice.windows ? 0 : 1][lane];
        choice.launches = priced.launches;
        float time = lane == 0 ? priced.time * SegmentModel::kGain : priced.time;
        unsigned best = lane;
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) {
            const float other = __shfl_xor_sync(kFullWarp, time, bit);
            const unsigned its = __shfl_xor_sync(kFullWarp, best, bit);
            if (other < time || (other == time && its < best)) time = other, best = its;
        }
        if (lane == best) shared.choice = choice;
        if (lane == best && blockIdx.x == 0) *params.choice = choice;
    }
    __syncthreads();
}

// The cuts, a (segment, value head) at a time.
__device__ __forceinline__ void store_windows(const TableParams& params, TableShared& shared) {
    const Inputs& in = params.in;
    const auto heads = static_cast<std::uint32_t>(in.problem.heads_v);
    const auto count = static_cast<int>(in.count);
    const std::uint32_t items = static_cast<std::uint32_t>(shared.segment[count]) * heads;
#pragma unroll 1
    for (std::uint32_t i = blockIdx.x; i < items; i += gridDim.x) {
        const auto number = static_cast<std::int32_t>(i / heads), head = static_cast<std::int32_t>(i % heads);
        int n = 0;
        for (int step = kMostSequences / 2; step > 0; step /= 2) {
            if (n + step < count && shared.segment[n + step] <= number) n += step;
        }
        const std::int32_t before = (number - shared.segment[n]) * shared.choice.segment_chunks;
        if (before == 0 || before >= static_cast<std::int32_t>(shared.length[n])) continue;
        const std::int64_t batch = in.cu_seqlens ? 0 : n;
        const std::int64_t cut = shared.begin[n] + std::int64_t(before) * params.chunk;
        const std::int32_t window = CutWindow(in, shared.window, batch, cut, before, head).length();
        if (threadIdx.x == 0) params.windows[i] = window;
    }
}

__global__ void __launch_bounds__(kTableThreads, 1) table_kernel(const __grid_constant__ TableParams params) {
    auto& shared = shared_block<TableShared>();
    static_assert(SegmentModel::kCandidates == 32);
    if (threadIdx.x == 0) shared.forgetful = shared.warm = 0;
    wait_for_earlier_grids();
    let_next_grid_start();
    const bool writes = blockIdx.x == 0;
    if (writes && threadIdx.x < SegmentCosts::kAllLaunches) params.taken[threadIdx.x] = 0;
    __syncthreads();
    GuessedWindows guessed(params);
    const std::int64_t used = clamped_used_tokens(params.in);
    std::uint32_t longest = 0, chunks = 0;
    each_sum(
        shared, params.in.count, params.most_chunks,
        [&](std::int64_t n) {
            const Span span = clamped_span(params.in, n);
            // NOTE: a division of 64 bits takes a hundred instructions; the tokens of a call are fewer than 2^31.
            const auto each = static_cast<std::uint32_t>(params.chunk);
            const std::uint32_t length = (static_cast<std::uint32_t>(span.length) + each - 1) / each;
            longest = max(longest, length);
            if (n < kMostSequences) shared.length[n] = length, shared.begin[n] = span.begin;
            return static_cast<std::int64_t>(length);
        },
        [&](std::int64_t n, std::int32_t sum) {
            if (writes) params.chunks[n] = sum;
            if (n == params.in.count) shared.counts[0].chunks = static_cast<std::uint32_t>(sum);
        });
    chunks = shared.counts[0].chunks;
    guessed.add_to(shared, used);
    __syncthreads();
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) longest = max(longest, __shfl_xor_sync(kFullWarp, longest, bit));
    if (threadIdx.x % 32 == 0) shared.longest[threadIdx.x / 32] = longest;
    __syncthreads();
    choose(params, shared, chunks);
    each_sum(
        shared, params.in.count, params.most_segments,
        [&](std::int64_t n) {
            const auto length = static_cast<std::int32_t>(
                n < kMostSequences ? shared.length[n]
                                   : static_cast<std::uint32_t>(params.chunks[n + 1] - params.chunks[n]));
            const std::int32_t each = shared.choice.segment_chunks;
            return static_cast<std::int64_t>(length > each ? (length - 1) / each + 1 : 1);
        },
        [&](std::int64_t n, std::int32_t sum) {
            if (writes) params.segments[n] = sum;
            if (n <= kMostSequences) shared.segment[n] = sum;
        });
    if (shared.choice.windows) store_windows(params, shared);
}

}  // namespace flashqla::cuda::sm80
