#pragma once

#include "cuda/device/shared_memory.cuh"
#include "cuda/device/tail.cuh"
#include "cuda/sm90/forward/diagonal.cuh"
#include "cuda/sm90/forward/gates.cuh"
#include "cuda/sm90/forward/loader.cuh"
#include "cuda/sm90/forward/triangles.cuh"
#include "cuda/sm90/forward/walk.cuh"

namespace flashqla::cuda::sm90 {

// Shares out the roles of a block. NOTE: warps of one warpgroup have the same registers.
template <class Config, ChunkMode kMode>
__device__ __forceinline__ void run_roles(const ForwardParams& params, ForwardShared<Config>& shared, int tokens) {
    const ForwardRole<Config, kMode> role{params, params.call, shared};
    const bool nothing = shared.place.segment.chunks == 0;
    const auto warp = static_cast<int>(uniform(threadIdx.x / 32));
    if (warp < Config::kWalkers / 32) {
        take_registers<Config::kWalkRegisters>();
        ForwardWalk<Config, kMode>(params, shared).run();
    } else if (warp < Config::kWalkers / 32 + 4) {
        give_registers<Config::kTriangleRegisters>();
        if (!nothing) ForwardTriangleMaker<Config, kMode>(role, warp % 4).run();
    } else {
        give_registers<Config::kOtherRegisters>();
        if (nothing) return;
        switch (warp % 4) {
            case 2: ForwardLoader<Config, kMode>(role).run(tokens); break;
            case 3: ForwardGates<Config, kMode>(role).run(tokens); break;
            default: ForwardDiagonal<Config, kMode>(role, warp % 4).run();
        }
    }
}

template <class Config, ChunkMode kMode>
__global__ void __launch_bounds__(Config::kThreads, 1) forward_kernel(const __grid_constant__ ForwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if (blockIdx.x >= params.segment_blocks) {
        return zero_tail(params.call, params.call.o, params.call.problem.heads_v, params.call.problem.dim_v,
                         blockIdx.x - params.segment_blocks, params.zero_blocks);
    }
    const auto heads = static_cast<std::uint32_t>(params.call.problem.heads_v);
    const std::uint32_t tile = blockIdx.x % params.tiles, row = blockIdx.x / params.tiles;
    const std::int64_t number = row / heads;
    const Segment segment = segment_of(params.call, params.table, number);
    if (segment.n < 0) return;
    auto& shared = aligned_shared_block<ForwardShared<Config>>();
    using Walk = ForwardWalk<Config, kMode>;
    const StatePlace place =
        Walk::place_of(params, segment, number, static_cast<std::int32_t>(row % heads), static_cast<int>(tile));
    if (threadIdx.x == 0) shared.place = place;
    if (!Walk::walks(place)) {
        __syncthreads();
        if (kMode == ChunkMode::outputs && threadIdx.x < Config::kWalkers) Walk(params, shared).run_padding();
        return;
    }
    shared.open(params.call);
    run_roles<Config, kMode>(params, shared, Walk(params, shared).tokens());
#endif
}

}  // namespace flashqla::cuda::sm90
