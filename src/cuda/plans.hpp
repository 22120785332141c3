// The plans of the CUDA backends.
#pragma once

#include <memory>

#include "base/backend.hpp"

namespace flashqla::cuda {

std::unique_ptr<PassPlan> plan_recurrent(const PlanRequest& request);

// Blocks of the recurrent kernel's grid for this problem, as a number that may be too large for one.
double recurrent_blocks(const Problem& problem);

}  // namespace flashqla::cuda
