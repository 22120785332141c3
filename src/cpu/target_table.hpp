// Access to the functions of every compiled SIMD target. Included after Highway.
#pragma once

#include <cstdint>

#include "hwy/highway.h"

// FQLA_FOR_TARGET(FN, bit): the function FN, passed to HWY_EXPORT before, of one target. With a single target in the
// build Highway makes tables of one entry; otherwise entry 0 is Highway's own dispatcher, the others lie in order of
// bits, and the scalar target comes last.
#if HWY_IDE || ((HWY_TARGETS & (HWY_TARGETS - 1)) == 0)
#define FQLA_FOR_TARGET(FN, target) ((void)(target), HWY_DISPATCH_TABLE(FN)[0])
#else
#define FQLA_FOR_TARGET(FN, target)                             \
    (HWY_DISPATCH_TABLE(FN)[hwy::Num0BitsBelowLS1Bit_Nonzero64( \
        static_cast<std::uint64_t>(HWY_CHOSEN_TARGET_SHIFT(target) | HWY_CHOSEN_TARGET_MASK_SCALAR))])
#endif
