// Which SIMD targets exist in this build and which one runs. Included by the files that compile kernels for all targets.
#pragma once

// The AVX3_DL target is used as AVX-512-BF16 (simd-inl.hpp); SSSE3 adds nothing over SSE4.
#define HWY_WANT_AVX3_DL
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_RVV | HWY_WASM | HWY_PPC8)

#include <cstdint>

// NOTE: highway.h must come after foreach_target.h, so it is not included here.

// FQLA_TARGET_TABLE(FN): the function of every compiled target, in Highway's order; FQLA_TARGET_INDEX(bit): the place of
// one target in it. With a single target in the build, Highway makes tables of one entry.
#if HWY_IDE || ((HWY_TARGETS & (HWY_TARGETS - 1)) == 0)
#define FQLA_TARGET_INDEX(target) 0
#else
#define FQLA_TARGET_INDEX(target) \
    hwy::Num0BitsBelowLS1Bit_Nonzero64(static_cast<std::uint64_t>(HWY_CHOSEN_TARGET_SHIFT(target)))
#endif
#define FQLA_FOR_TARGET(FN, target) (HWY_DISPATCH_TABLE(FN)[FQLA_TARGET_INDEX(target)])
