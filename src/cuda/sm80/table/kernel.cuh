// One block; a thread has a sequence at a time.
#pragma once

#include <cub/block/block_scan.cuh>

#include "cuda/device/chunks.cuh"
#include "cuda/sm80/table/params.hpp"

namespace flashqla::cuda::sm80 {

inline constexpr int kTableThreads = 256;

// NOTE: offsets that decrease make sequences overlap, and then there can be more chunks than tokens allow. Those beyond
// the bound are left out: they have no place in the workspace.
__device__ __forceinline__ void store_sums(const TableParams& params, std::int64_t n, std::int64_t both, int shift) {
    params.chunks[n] = static_cast<std::int32_t>(clamp(both & 0xffffffff, 0, params.most_chunks));
    params.segments[n] = static_cast<std::int32_t>(clamp(both >> shift, 0, params.most_segments));
}

__global__ void __launch_bounds__(kTableThreads) table_kernel(const __grid_constant__ TableParams params) {
    using Scan = cub::BlockScan<std::int64_t, kTableThreads>;
    __shared__ typename Scan::TempStorage scratch;
    // Both sums in one number: segments above, chunks below. Neither reaches 2^31.
    constexpr int kShift = 32;
    std::int64_t before = 0;
    for (std::int64_t begin = 0; begin < params.in.count; begin += kTableThreads) {
        const std::int64_t n = begin + threadIdx.x;
        std::int64_t both = 0, sum, total;
        if (n < params.in.count) {
            const std::int64_t chunks = pieces(clamped_span(params.in, n).length, params.chunk);
            both = chunks + ((chunks > 0 ? pieces(chunks, params.segment_chunks) : 1) << kShift);
        }
        Scan(scratch).ExclusiveSum(both, sum, total);
        sum += before;
        if (n < params.in.count) store_sums(params, n, sum, kShift);
        before += total;
        __syncthreads();
    }
    if (threadIdx.x == 0) store_sums(params, params.in.count, before, kShift);
}

}  // namespace flashqla::cuda::sm80
