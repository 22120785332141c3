// The candidate list: every backend of this build, best first. Nothing outside backends.cpp names a backend.
#pragma once

#include <span>

#include "base/backend.hpp"

namespace flashqla {

std::span<const Backend* const> backends() noexcept;

}  // namespace flashqla
