// The pieces from which dispatch.cpp puts together the kernels of a target; `target` is Highway's bit.
#pragma once

#include <cstdint>

#include "cpu/kernels.hpp"

namespace flashqla::cpu {

void add_forward(Kernels& to, std::int64_t target);
void add_recurrent(Kernels& to, std::int64_t target);
void add_backward(Kernels& to, std::int64_t target);

}  // namespace flashqla::cpu
