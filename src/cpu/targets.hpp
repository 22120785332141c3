// Which SIMD targets exist in this build and which one runs. Included by the files that compile kernels for all
// targets.
#pragma once

// The AVX3_DL target is used as AVX-512-BF16 (simd-inl.hpp); SSSE3 adds nothing over SSE4.
#define HWY_WANT_AVX3_DL
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_RVV | HWY_WASM | HWY_PPC8)

#include <cstdint>

// NOTE: highway.h must come after foreach_target.h, so it is not included here.
