// Compiles the backward kernels for every SIMD target.
#include "cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/backward.cpp"
#include "hwy/foreach_target.h"  // NOTE: includes this file again for each target but the last
//
#include "cpu/backward-inl.hpp"

#if HWY_ONCE
#include "cpu/dispatch.hpp"
#include "cpu/target_table.hpp"

namespace flashqla::cpu {

HWY_EXPORT(backward_task);
HWY_EXPORT(backward_scratch);

void add_backward(Kernels& to, std::int64_t target) {
    to.backward = FQLA_FOR_TARGET(backward_task, target);
    to.backward_scratch = FQLA_FOR_TARGET(backward_scratch, target);
}

}  // namespace flashqla::cpu
#endif
