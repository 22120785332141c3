// Compiles the forward kernels for every SIMD target.
#include "cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/forward.cpp"
#include "hwy/foreach_target.h"  // NOTE: includes this file again for each target but the last
//
#include "cpu/forward-inl.hpp"

FQLA_BEGIN_TARGET
namespace flashqla::cpu {
namespace HWY_NAMESPACE {

// NOTE: not inline: code outside the target's attributes calls it, and compilers refuse to inline across them.
std::size_t columns_of_strip() { return strip_columns(); }

}  // namespace HWY_NAMESPACE
}  // namespace flashqla::cpu
FQLA_END_TARGET

#if HWY_ONCE
#include "cpu/dispatch.hpp"
#include "cpu/target_table.hpp"

namespace flashqla::cpu {

HWY_EXPORT(forward_task);
HWY_EXPORT(forward_scratch);
HWY_EXPORT(columns_of_strip);

void add_forward(Kernels& to, std::int64_t target) {
    to.strip_columns = FQLA_FOR_TARGET(columns_of_strip, target)();
    to.forward = FQLA_FOR_TARGET(forward_task, target);
    to.forward_scratch = FQLA_FOR_TARGET(forward_scratch, target);
}

}  // namespace flashqla::cpu
#endif
