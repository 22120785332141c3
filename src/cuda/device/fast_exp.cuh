// e^x in two instructions.
#pragma once

namespace flashqla::cuda {

// Relative error 2^-22 + 2^-24 |x|; 0 where the result would be subnormal.
__device__ __forceinline__ float fast_exp(float x) {
    constexpr float kLog2E = 1.4426950408889634f;
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * kLog2E));
    return y;
}

}  // namespace flashqla::cuda
