// Picks the kernel by the size of K, the columns of a block and the mode; a file for each operand compiles it.
#pragma once

#include "cuda/sm90/chunk/kernel.cuh"
#include "cuda/sm90/chunk/operands.hpp"

namespace flashqla::cuda::sm90 {

template <class Op>
Status launch_chunks_of(const LaunchSite& site, const ChunkParams& params) noexcept {
    return with_walk_config<Op>(params.call.problem.dim_k, params.columns, [&]<class Config>() {
        const LaunchShape shape{params.segment_blocks + params.zero_blocks, Config::kThreads,
                                sizeof(ChunkShared<Config>)};
        return with_mode(params.mode,
                         [&]<ChunkMode kMode>() { return launch(site, shape, &chunk_kernel<Config, kMode>, params); });
    });
}

}  // namespace flashqla::cuda::sm90
