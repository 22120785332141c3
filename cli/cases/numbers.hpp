// Random numbers that are the same on every machine, and the 16-bit formats.
//
// NOTE: the conversions repeat what the library has on purpose: the tool judges the library, so it does not borrow its
// rounding.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "flashqla/flashqla.hpp"

namespace flashqla::cases {

inline std::uint64_t mix(std::uint64_t x) noexcept {  // splitmix64's finaliser
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// A counter-based generator: a value depends on what it is (tensor, sequence, token, head, element), never on where it
// lies in memory or on what was drawn before. The same sequence alone, packed or cut in two has the same values.
class Draw {
public:
    Draw(std::uint64_t seed, int tensor, std::int64_t a = 0, std::int64_t b = 0, std::int64_t c = 0) noexcept {
        key_ = mix(seed ^ (static_cast<std::uint64_t>(tensor) << 56));
        for (const std::int64_t x : {a, b, c}) key_ = mix(key_ ^ static_cast<std::uint64_t>(x));
    }

    // In (0, 1).
    double uniform(std::int64_t i = 0) const noexcept { return (static_cast<double>(bits(i) >> 11) + 0.5) * 0x1p-53; }
    // Mean 0, variance 1, within +-3.47: the sum of four 16-bit uniforms. No libm call, so no machine differs.
    double normal(std::int64_t i = 0) const noexcept {
        const std::uint64_t x = bits(i);
        const auto sum =
            static_cast<std::int64_t>((x & 0xffff) + ((x >> 16) & 0xffff) + ((x >> 32) & 0xffff) + (x >> 48));
        return static_cast<double>(sum - 2 * 0xffff) * (1.7320508075688772 / 65536.0);
    }
    std::uint64_t bits(std::int64_t i) const noexcept { return mix(key_ + static_cast<std::uint64_t>(i)); }

private:
    std::uint64_t key_;
};

// To nearest even; beyond the largest f16, infinity.
inline std::uint16_t to_16_bits(float x, DType dtype) noexcept {
    const auto u = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    if (dtype == DType::bf16) {
        if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7fc0u);
        const std::uint32_t half = 0x8000u, low = magnitude & 0xffffu, high = magnitude >> 16;
        return static_cast<std::uint16_t>(sign | (high + (low > half || (low == half && (high & 1u)) ? 1u : 0u)));
    }
    if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
    const float a = std::bit_cast<float>(magnitude);
    if (a >= 65520.0f) return static_cast<std::uint16_t>(sign | 0x7c00u);
    int exponent = -13;                           // subnormals share the smallest exponent
    if (a >= 0x1p-14f) std::frexp(a, &exponent);  // a in [2^(e-1), 2^e)
    const auto steps = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(a, 11 - exponent)));  // 0..2048
    // A carry out of the 11 bits moves into the exponent by itself.
    return static_cast<std::uint16_t>(sign | ((static_cast<std::uint32_t>(exponent + 13) << 10) + steps));
}

inline float from_16_bits(std::uint16_t x, DType dtype) noexcept {
    if (dtype == DType::bf16) return std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16);
    const int exponent = (x >> 10) & 31, mantissa = x & 1023;
    const float sign = (x & 0x8000u) ? -1.0f : 1.0f;
    if (exponent == 31) return mantissa ? std::bit_cast<float>(0x7fc00000u) : sign * HUGE_VALF;
    if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
    return sign * std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
}

inline void store(void* data, DType dtype, std::int64_t i, double x) noexcept {
    switch (dtype) {
        case DType::f32: static_cast<float*>(data)[i] = static_cast<float>(x); break;
        case DType::f16:
        case DType::bf16: static_cast<std::uint16_t*>(data)[i] = to_16_bits(static_cast<float>(x), dtype); break;
        case DType::i32: static_cast<std::int32_t*>(data)[i] = static_cast<std::int32_t>(x); break;
        case DType::i64: static_cast<std::int64_t*>(data)[i] = static_cast<std::int64_t>(x); break;
        case DType::u8: static_cast<std::uint8_t*>(data)[i] = static_cast<std::uint8_t>(x); break;
        case DType::none: break;
    }
}

inline double load(const void* data, DType dtype, std::int64_t i) noexcept {
    switch (dtype) {
        case DType::f32: return static_cast<const float*>(data)[i];
        case DType::f16:
        case DType::bf16: return from_16_bits(static_cast<const std::uint16_t*>(data)[i], dtype);
        case DType::i32: return static_cast<const std::int32_t*>(data)[i];
        case DType::i64: return static_cast<double>(static_cast<const std::int64_t*>(data)[i]);
        case DType::u8: return static_cast<const std::uint8_t*>(data)[i];
        case DType::none: break;
    }
    return 0;
}

inline double rounded(double x, DType dtype) noexcept {
    if (dtype == DType::f16 || dtype == DType::bf16) {
        return from_16_bits(to_16_bits(static_cast<float>(x), dtype), dtype);
    }
    return static_cast<float>(x);
}

}  // namespace flashqla::cases
