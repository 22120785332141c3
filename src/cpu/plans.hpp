// The passes of the CPU backend.
#pragma once

#include <memory>

#include "base/backend.hpp"

namespace flashqla::cpu {

std::unique_ptr<PassPlan> plan_forward(const PlanRequest& request);
std::unique_ptr<PassPlan> plan_backward(const PlanRequest& request);
std::unique_ptr<PassPlan> plan_decode(const PlanRequest& request);

// Threads a plan uses: the option, or what OpenMP would take.
std::int32_t threads_of(const PlanOptions& options);

inline constexpr std::int32_t kMaxAutomaticSegments = 64;  // of a sequence that is cut by time

}  // namespace flashqla::cpu
