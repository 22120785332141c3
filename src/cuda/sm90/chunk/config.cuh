// Who holds what: src/cuda/device/hopper_walk.cuh. S^T is what a warpgroup has in its registers.
#pragma once

#include "cuda/device/hopper_walk.cuh"
#include "cuda/device/state_walk.cuh"
#include "cuda/sm90/chunk/params.hpp"

namespace flashqla::cuda::sm90 {

template <class Config>
struct ChunkShared : HopperWalkShared<Config, Rows::along_k> {
    StatePlace place;
};

}  // namespace flashqla::cuda::sm90
