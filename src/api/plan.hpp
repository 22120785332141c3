// What a Plan holds.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "base/backend.hpp"

namespace flashqla {

struct Refusal {
    const char* backend;
    std::string reason;
};

struct PlannedPass {
    const Backend* backend = nullptr;  // null: not planned, and `missing` says why
    std::unique_ptr<const PassPlan> pass;
    std::vector<Refusal> refusals;  // of the better candidates, best first
    Status missing;

    // Scratch of the api room itself, behind the backend's: slots sorted to find repeated ones.
    Booking<std::int64_t> slot_check;
    std::size_t workspace_bytes = 0;
};

// NOTE: hidden by hand, because a member of an exported class is exported with it.
struct __attribute__((visibility("hidden"))) Plan::Impl {
    Problem problem;  // defaults filled in
    Device device;
    PlanOptions options;
    std::string forced;     // the one backend considered; "" = all
    std::string forced_by;  // who said so
    std::array<PlannedPass, 3> passes;

    const PlannedPass& of(Pass pass) const noexcept { return passes[static_cast<std::size_t>(pass)]; }
    PlannedPass& of(Pass pass) noexcept { return passes[static_cast<std::size_t>(pass)]; }
};

}  // namespace flashqla
