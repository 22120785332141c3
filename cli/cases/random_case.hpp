#pragma once

#include <cstdint>

#include "cases/case.hpp"

namespace flashqla::cases {

// A small valid case with random sizes, types, strides and options. The same seed gives the same case everywhere.
Case random_case(std::uint64_t seed);

}  // namespace flashqla::cases
