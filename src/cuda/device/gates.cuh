// Decay and beta of a token, from the bits of their arguments.
#pragma once

#include "base/call.hpp"
#include "cuda/device/memory.cuh"

namespace flashqla::cuda {

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Below this a decay is zero in fp32 with room to spare; -inf becomes a number.
__device__ __forceinline__ float smallest_log_decay(float g) {
    constexpr float kSmallest = -1.0e4f;
    return g < kSmallest ? kSmallest : g;
}

// What one value head's gate is made of besides g: read once, not once a token.
struct HeadGate {
    float rate = 0.0f, bias = 0.0f;

    HeadGate() = default;
    __device__ __forceinline__ HeadGate(const Inputs& in, std::int32_t head) {
        if (in.problem.gate != Gate::raw) return;
        rate = expf(load_element(in.A_log.data, in.A_log.dtype, head * in.A_log.stride));
        if (in.dt_bias) bias = load_element(in.dt_bias.data, in.dt_bias.dtype, head * in.dt_bias.stride);
    }

    // exp(g); 0 for g = -inf.
    __device__ __forceinline__ float decay(const Inputs& in, std::uint32_t g_bits) const {
        if (in.problem.gate == Gate::none) return 1.0f;
        return expf(log_of(in, g_bits));
    }

    // g, as a number whose sums can be subtracted from each other.
    __device__ __forceinline__ float log_decay(const Inputs& in, std::uint32_t g_bits) const {
        if (in.problem.gate == Gate::none) return 0.0f;
        return smallest_log_decay(log_of(in, g_bits));
    }

private:
    __device__ __forceinline__ float log_of(const Inputs& in, std::uint32_t g_bits) const {
        const float g = float_of_bits(g_bits, in.g.dtype);
        return in.problem.gate == Gate::raw ? -rate * softplus(g + bias) : g;
    }
};

__device__ __forceinline__ float beta_of(const Inputs& in, std::uint32_t bits) {
    if (!in.beta) return in.problem.beta_factor;
    const float b = float_of_bits(bits, in.beta.dtype);
    return in.problem.beta_factor * (in.problem.beta_mode == BetaMode::logit ? 1.0f / (1.0f + expf(-b)) : b);
}

}  // namespace flashqla::cuda
