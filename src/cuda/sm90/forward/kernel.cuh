#pragma once

#include "cuda/device/grid_order.cuh"
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
__device__ __forceinline__ void run_roles(const ForwardParams& params, ForwardShared<Config>& shared) {
    const ForwardRole<Config, kMode> role{params, params.call, shared};
    const auto warp = static_cast<int>(uniform(threadIdx.x / 32));
    if (warp < Config::kWalkers / 32) {
        take_registers<Config::kWalkRegisters>();
        ForwardWalk<Config, kMode>::run_all(params, shared);
    } else if (warp < Config::kWalkers / 32 + 4) {
        give_registers<Config::kTriangleRegisters>();
        ForwardTriangleMaker<Config, kMode>(role, warp % 4).run();
    } else {
        give_registers<Config::kOtherRegisters>();
        switch (warp % 4) {
            case 2: ForwardLoader<Config, kMode>(role).run(); break;
            case 3: ForwardGates<Config, kMode>(role).run(); break;
            default: ForwardDiagonal<Config, kMode>(role, warp % 4).run();
        }
    }
}

template <class Config, ChunkMode kMode>
__global__ void __launch_bounds__(Config::kThreads, 1) forward_kernel(const __grid_constant__ ForwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    auto& shared = aligned_shared_block<ForwardShared<Config>>();
    if constexpr (kMode == ChunkMode::outputs) {
        shared.open(params.call);
        // NOTE: with windows the loader waits, later, for what is carried: all that is before the carry has ended when
        // that lets this kernel start.
        if (!params.states.windows) wait_for_earlier_grids();
    } else {
        wait_for_earlier_grids();
        let_next_grid_start();
        if (!is_needed(params.table)) return;
        shared.open(params.call);
    }
    run_roles<Config, kMode>(params, shared);
#endif
}

}  // namespace flashqla::cuda::sm90
