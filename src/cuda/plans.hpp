// The plans of the CUDA backends.
#pragma once

#include <memory>
#include <string>

#include "base/backend.hpp"

namespace flashqla::cuda {

std::unique_ptr<PassPlan> plan_recurrent(const PlanRequest& request);

// Whether chunks are the better way for the forward pass of this problem, and whether they can do it.
bool forward_in_chunks(const PlanRequest& request);
std::unique_ptr<PassPlan> plan_chunked_forward(const PlanRequest& request);

// Empty, or why the backward pass of this problem cannot run on its device.
std::string why_not_backward(const PlanRequest& request);
std::unique_ptr<PassPlan> plan_chunked_backward(const PlanRequest& request);

// Blocks of the recurrent kernel's grid for this problem, as a number that may be too large for one.
double recurrent_blocks(const Problem& problem);

}  // namespace flashqla::cuda
