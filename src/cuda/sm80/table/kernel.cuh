// One block. A thread has a sequence at a time for the sums; for the choice a warp has a candidate at a time, and a
// lane of the first warp prices one.
#pragma once

#include <cub/block/block_scan.cuh>

#include "cuda/device/chunks.cuh"
#include "cuda/device/grid_order.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/sm80/table/params.hpp"

namespace flashqla::cuda::sm80 {

inline constexpr int kTableThreads = 256;

struct TableShared {
    typename cub::BlockScan<std::int64_t, kTableThreads>::TempStorage scan;
    std::uint32_t longest[kTableThreads / 32];
    SegmentCounts counts[SegmentModel::kCandidates];
    SegmentChoice choice;
};

// Stores the sums of all numbers before each; they are of(n). NOTE: offsets that decrease make sequences overlap, and
// then there can be more chunks than tokens allow. Those beyond the bound are left out: they have no place in the
// workspace.
template <class F>
__device__ __forceinline__ void store_sums(TableShared& shared, std::int32_t* to, std::int64_t count, std::int64_t most,
                                           F&& of) {
    std::int64_t before = 0;
    for (std::int64_t begin = 0; begin < count; begin += kTableThreads) {
        const std::int64_t n = begin + threadIdx.x;
        std::int64_t sum, total;
        cub::BlockScan<std::int64_t, kTableThreads>(shared.scan).ExclusiveSum(n < count ? of(n) : 0, sum, total);
        if (n < count) to[n] = static_cast<std::int32_t>(clamp(before + sum, 0, most));
        before += total;
        __syncthreads();
    }
    if (threadIdx.x == 0) to[count] = static_cast<std::int32_t>(clamp(before, 0, most));
    __syncthreads();
}

// The same choice for the same lengths, whatever else runs: all sums are of integers, and of two that take the same
// time it is the one with fewer segments.
__device__ __forceinline__ void choose(const TableParams& params, TableShared& shared) {
    const SegmentCosts& costs = params.costs;
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto length = [&](std::int64_t n) {
        return static_cast<std::uint32_t>(params.chunks[n + 1] - params.chunks[n]);
    };
    std::uint32_t longest = 1;
#pragma unroll
    for (int i = 0; i < kTableThreads / 32; ++i) longest = max(longest, shared.longest[i]);

    for (int candidate = warp; candidate < SegmentModel::kCandidates; candidate += kTableThreads / 32) {
        const std::int32_t each = SegmentModel::segment_chunks(costs, longest, candidate);
        SegmentCounts counts;
        for (std::int64_t n = lane; n < params.in.count; n += 32) counts.add(1, length(n), each);
        counts.chunks = params.chunks[params.in.count];
        counts.longest = longest;
        counts.segments = warp_sum(counts.segments);
        counts.full = warp_sum(counts.full);
        counts.cuts = warp_sum(counts.cuts);
        counts.cut = warp_sum(counts.cut);
        if (lane == 0) shared.counts[candidate] = counts;
    }
    __syncthreads();
    if (warp == 0) {
        SegmentChoice choice;
        choice.segment_chunks = SegmentModel::segment_chunks(costs, longest, lane);
        float time = SegmentModel::time(costs, shared.counts[lane], choice.segment_chunks, choice.launches);
        if (lane == 0) time *= SegmentModel::kGain;
        unsigned best = lane;
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) {
            const float other = __shfl_xor_sync(kFullWarp, time, bit);
            const unsigned its = __shfl_xor_sync(kFullWarp, best, bit);
            if (other < time || (other == time && its < best)) time = other, best = its;
        }
        if (lane == best) shared.choice = *params.choice = choice;
    }
    __syncthreads();
}

__global__ void __launch_bounds__(kTableThreads) table_kernel(const __grid_constant__ TableParams params) {
    wait_for_earlier_grids();
    let_next_grid_start();
    auto& shared = shared_block<TableShared>();
    if (threadIdx.x < SegmentCosts::kAllLaunches) params.taken[threadIdx.x] = 0;
    static_assert(SegmentModel::kCandidates == 32);
    std::uint32_t longest = 0;
    store_sums(shared, params.chunks, params.in.count, params.most_chunks, [&](std::int64_t n) {
        const std::int64_t chunks = pieces(clamped_span(params.in, n).length, params.chunk);
        longest = max(longest, static_cast<std::uint32_t>(chunks));
        return chunks;
    });
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) longest = max(longest, __shfl_xor_sync(kFullWarp, longest, bit));
    if (threadIdx.x % 32 == 0) shared.longest[threadIdx.x / 32] = longest;
    __syncthreads();
    choose(params, shared);
    store_sums(shared, params.segments, params.in.count, params.most_segments, [&](std::int64_t n) {
        const std::int32_t chunks = params.chunks[n + 1] - params.chunks[n], each = shared.choice.segment_chunks;
        return chunks > each ? (chunks - 1) / each + 1 : 1;
    });
}

}  // namespace flashqla::cuda::sm80
