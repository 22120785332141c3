// Picks the kernel by the size of K and the mode; a file for each operand compiles it.
#pragma once

#include "cuda/sm80/chunk/kernel.cuh"
#include "cuda/sm80/chunk/operands.hpp"

namespace flashqla::cuda::sm80 {

template <class Config>
Status launch_chunks_config(const LaunchSite& site, const ChunkParams& params) noexcept {
    const LaunchShape shape{params.segment_blocks + params.zero_blocks, Config::kThreads,
                            params.stages * sizeof(ChunkStage<Config>)};
    return with_mode(params.mode,
                     [&]<ChunkMode kMode>() { return launch(site, shape, &chunk_kernel<Config, kMode>, params); });
}

template <class Op, int kK>
Status launch_chunks_width(const LaunchSite& site, const ChunkParams& params) noexcept {
    if constexpr (Op::kParts == 1 && kK <= 128) {
        if (params.columns == 128) return launch_chunks_config<ChunkConfig<Op, kK, 128>>(site, params);
    }
    return launch_chunks_config<ChunkConfig<Op, kK, 64>>(site, params);
}

template <class Op>
Status launch_chunks_of(const LaunchSite& site, const ChunkParams& params) noexcept {
    switch (chunk_width(params.call.problem.dim_k)) {
        case 64: return launch_chunks_width<Op, 64>(site, params);
        case 128: return launch_chunks_width<Op, 128>(site, params);
        default: return launch_chunks_width<Op, 256>(site, params);
    }
}

}  // namespace flashqla::cuda::sm80
