#pragma once

#include "cuda/device/grid_order.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/sm90/forward/gates.cuh"
#include "cuda/sm90/forward/loader.cuh"
#include "cuda/sm90/forward/solver.cuh"
#include "cuda/sm90/forward/triangles.cuh"
#include "cuda/sm90/forward/walk.cuh"
#include "cuda/sm90/forward/windows.cuh"

namespace flashqla::cuda::sm90 {

// Shares out the roles of a block. kCut: some sequence is cut; else `first` is the segment of the block's first item.
// NOTE: warps of one warpgroup have the same registers.
template <class Config, bool kCut>
__device__ __forceinline__ void run_roles(const ForwardParams& params, ForwardShared<Config>& shared,
                                          const SegmentRecord& first) {
    const ForwardRole<Config> role{params, params.call, shared};
    const auto warp = static_cast<int>(uniform(threadIdx.x / 32));
    if (warp < Config::kWalkers / 32) {
        take_registers<Config::kWalkRegisters>();
        if constexpr (kCut) {
            const SegmentChoice choice = choice_of(params.table);
            // NOTE: here, because before the roles part it would cost them registers.
            if (choice.windows) WindowFinder<Config>(params, shared).run(choice.segments);
            ForwardWalk<Config, ChunkMode::ends, kCut>::run_all(params, shared);
        }
        ForwardWalk<Config, ChunkMode::outputs, kCut>::run_all(params, shared);
    } else if (warp < Config::kWalkers / 32 + 4) {
        give_registers<Config::kTriangleRegisters>();
        ForwardTriangleMaker<Config>(role, warp % 4).template run<kCut>();
    } else {
        give_registers<Config::kOtherRegisters>();
        switch (warp % 4) {
            case 2: ForwardLoader<Config, kCut>(role).run(first); break;
            case 3: ForwardGates<Config>(role).run(); break;
            default: ForwardSolver<Config>(role, warp % 4).run();
        }
    }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) forward_kernel(const __grid_constant__ ForwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    auto& shared = aligned_shared_block<ForwardShared<Config>>();
    shared.open(params);
    const std::uint32_t each = item_tiles(params), number = min(blockIdx.x, params.segment_blocks - 1) / each;
    wait_for_earlier_grids();
    // NOTE: asked for before it is known whether it is the one, which is asked for at the same time.
    const SegmentRecord first = record_of(params, number);
    // NOTE: both in full, because what only cuts need, between what every item does, makes items take longer.
    if (params.states.starts && uniform(choice_of(params.table).cut) > 0) {
        run_roles<Config, true>(params, shared, first);
    } else {
        run_roles<Config, false>(params, shared, first);
    }
#endif
}

}  // namespace flashqla::cuda::sm90
