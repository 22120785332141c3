// Compiles the forward kernels for every SIMD target.
#include "cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/forward.cpp"
#include "hwy/foreach_target.h"  // NOTE: includes this file again for each target but the last
//
#include "cpu/forward-inl.hpp"

#if HWY_ONCE
#include "cpu/dispatch.hpp"
#include "cpu/target_table.hpp"

namespace flashqla::cpu {

HWY_EXPORT(forward_task);
HWY_EXPORT(forward_scratch);
HWY_EXPORT(strip_columns);

void add_forward(Kernels& to, std::int64_t target) {
    to.strip_columns = FQLA_FOR_TARGET(strip_columns, target)();
    to.forward = FQLA_FOR_TARGET(forward_task, target);
    to.forward_scratch = FQLA_FOR_TARGET(forward_scratch, target);
}

}  // namespace flashqla::cpu
#endif
