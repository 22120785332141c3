// The last kernel of a backward pass: a block for each value head adds up what the chunks gave to its A_log and
// dt_bias, the others zero the rows past the last sequence.
#pragma once

#include <cub/block/block_reduce.cuh>

#include "cuda/device/chunks.cuh"
#include "cuda/device/grid_order.cuh"
#include "cuda/device/tail.cuh"
#include "cuda/sm80/gradient/params.hpp"

namespace flashqla::cuda::sm80 {

inline constexpr int kFinishThreads = 256;

// The sum over all chunks in an order that depends on their number alone.
__device__ __forceinline__ void sum_over_chunks(const HeadRef& to, const double* parts, std::int64_t chunks,
                                                std::int32_t heads, std::int32_t head) {
    using Reduce = cub::BlockReduce<double, kFinishThreads>;
    __shared__ typename Reduce::TempStorage scratch;
    double sum = 0.0;
    for (std::int64_t c = threadIdx.x; c < chunks; c += kFinishThreads) sum += parts[c * heads + head];
    sum = Reduce(scratch).Sum(sum);
    if (threadIdx.x == 0 && to) store_element(to.data, to.dtype, head * to.stride, static_cast<float>(sum));
    __syncthreads();
}

__global__ void __launch_bounds__(kFinishThreads) finish_kernel(const __grid_constant__ FinishParams params) {
    wait_for_earlier_grids();
    const BackwardCall& call = params.call;
    const Problem& p = call.problem;
    if (blockIdx.x < params.head_blocks) {
        const std::int64_t chunks =
            params.table.chunks ? params.table.chunks[call.count] : call.count * pieces(p.tokens, params.table.chunk);
        const auto head = static_cast<std::int32_t>(blockIdx.x);
        sum_over_chunks(call.d_A_log, params.d_A_log, chunks, p.heads_v, head);
        sum_over_chunks(call.d_dt_bias, params.d_dt_bias, chunks, p.heads_v, head);
        return;
    }
    const std::int64_t block = blockIdx.x - params.head_blocks, blocks = params.zero_blocks;
    zero_tail(call, call.d_q, p.heads_k, p.dim_k, block, blocks);
    zero_tail(call, call.d_k, p.heads_k, p.dim_k, block, blocks);
    zero_tail(call, call.d_v, p.heads_v, p.dim_v, block, blocks);
    zero_tail(call, call.d_g, p.heads_v, 1, block, blocks);
    zero_tail(call, call.d_beta, p.heads_v, 1, block, blocks);
}

}  // namespace flashqla::cuda::sm80
