// Compiles the recurrent kernels for every SIMD target.
#include "cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/recurrent.cpp"
#include "hwy/foreach_target.h"  // NOTE: includes this file again for each target but the last
//
#include "cpu/recurrent-inl.hpp"

#if HWY_ONCE
#include "cpu/dispatch.hpp"
#include "cpu/target_table.hpp"

namespace flashqla::cpu {

HWY_EXPORT(recurrent_task);
HWY_EXPORT(recurrent_scratch);
HWY_EXPORT(join_carry);
HWY_EXPORT(join_adjoint);

void add_recurrent(Kernels& to, std::int64_t target) {
    to.recurrent = FQLA_FOR_TARGET(recurrent_task, target);
    to.recurrent_scratch = FQLA_FOR_TARGET(recurrent_scratch, target);
    to.join = FQLA_FOR_TARGET(join_carry, target);
    to.join_adjoint = FQLA_FOR_TARGET(join_adjoint, target);
}

}  // namespace flashqla::cpu
#endif
