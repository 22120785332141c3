// Who holds what: src/cuda/device/hopper_walk.cuh. D^T is what a warpgroup has in its registers.
#pragma once

#include "cuda/device/hopper_walk.cuh"
#include "cuda/sm90/adjoint/params.hpp"

namespace flashqla::cuda::sm90 {

template <class Config>
using AdjointShared = HopperWalkShared<Config, Rows::across_k>;

}  // namespace flashqla::cuda::sm90
