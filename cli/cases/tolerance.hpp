// The one place that says how exact a result has to be.
#pragma once

#include <cstdint>
#include <string_view>

#include "cases/case.hpp"

namespace flashqla::cases {

struct Tolerance {
    double per_head = 0;  // relative L2 error of one head
    double whole = 0;     // relative L2 error of the whole output
    // A head whose reference is weaker than `floor` times the RMS of the whole output is judged as if it had that
    // RMS: below it, the terms that were added up were far larger than their sum, and the sum carries their rounding.
    double floor = 0;
    // Absolute error that every element may have: half the smallest step of the stored format.
    double absolute = 0;
};

// `stored`: the type the output is stored in; `head_elements`: elements of one head.
Tolerance tolerance(const Case& c, std::string_view output, DType stored, std::int64_t head_elements);

}  // namespace flashqla::cases
