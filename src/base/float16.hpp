// Scalar conversions between float and the 16-bit formats, round to nearest even. Used where speed does not matter;
// kernels have their own vector forms.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "flashqla/flashqla.hpp"

namespace flashqla {

inline float bf16_to_float(std::uint16_t x) noexcept {
    return std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16);
}

inline std::uint16_t float_to_bf16(float x) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40);  // NaN stays NaN
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float f16_to_float(std::uint16_t x) noexcept {
    const std::uint32_t sign = static_cast<std::uint32_t>(x & 0x8000u) << 16;
    const std::uint32_t exponent = (x >> 10) & 0x1fu, mantissa = x & 0x3ffu;
    if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
    if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // zero and subnormals, exact
    return sign ? -magnitude : magnitude;
}

inline std::uint16_t float_to_f16(float x) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);   // NaN
    if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds to infinity
    if (magnitude < 0x38800000u) {  // subnormal or zero: the adder rounds at 2^-24
        const float scaled = std::bit_cast<float>(magnitude) + 0.5f;
        return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(scaled) - 0x3f000000u));
    }
    const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

inline float load_float(const void* data, DType dtype, std::int64_t i) noexcept {
    switch (dtype) {
        case DType::f32: return static_cast<const float*>(data)[i];
        case DType::f16: return f16_to_float(static_cast<const std::uint16_t*>(data)[i]);
        case DType::bf16: return bf16_to_float(static_cast<const std::uint16_t*>(data)[i]);
        default: return 0.0f;
    }
}

inline void store_float(void* data, DType dtype, std::int64_t i, float x) noexcept {
    switch (dtype) {
        case DType::f32: static_cast<float*>(data)[i] = x; break;
        case DType::f16: static_cast<std::uint16_t*>(data)[i] = float_to_f16(x); break;
        case DType::bf16: static_cast<std::uint16_t*>(data)[i] = float_to_bf16(x); break;
        default: break;
    }
}

}  // namespace flashqla
