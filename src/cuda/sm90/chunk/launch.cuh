// Picks the kernel by the size of K, the columns of a block and the mode; a file for each operand compiles it.
#pragma once

#include "cuda/sm90/chunk/kernel.cuh"
#include "cuda/sm90/chunk/operands.hpp"

namespace flashqla::cuda::sm90 {

template <class Config, ChunkMode kMode>
Status launch_chunks_mode(const LaunchSite& site, const ChunkParams& params) noexcept {
    const LaunchShape shape{params.segment_blocks + params.zero_blocks, Config::kThreads, sizeof(ChunkShared<Config>)};
    return launch(site, shape, &chunk_kernel<Config, kMode>, params);
}

template <class Config>
Status launch_chunks_config(const LaunchSite& site, const ChunkParams& params) noexcept {
    switch (params.mode) {
        case ChunkMode::ends: return launch_chunks_mode<Config, ChunkMode::ends>(site, params);
        case ChunkMode::history: return launch_chunks_mode<Config, ChunkMode::history>(site, params);
        default: return launch_chunks_mode<Config, ChunkMode::outputs>(site, params);
    }
}

template <class Op, int kK>
Status launch_chunks_width(const LaunchSite& site, const ChunkParams& params) noexcept {
    return params.columns == 128 ? launch_chunks_config<ChunkConfig<Op, kK, 128>>(site, params)
                                 : launch_chunks_config<ChunkConfig<Op, kK, 64>>(site, params);
}

template <class Op>
Status launch_chunks_of(const LaunchSite& site, const ChunkParams& params) noexcept {
    return params.call.problem.dim_k <= 64 ? launch_chunks_width<Op, 64>(site, params)
                                           : launch_chunks_width<Op, 128>(site, params);
}

}  // namespace flashqla::cuda::sm90
