// Division of numbers below 2^31 by one that the host knows, without a division.
#pragma once

#include <cstdint>

#include "base/call.hpp"

namespace flashqla::cuda {

class Divider {
public:
    Divider() = default;
    explicit Divider(std::uint32_t divisor) noexcept : divisor_(divisor) {
        while ((std::uint64_t{1} << shift_) < divisor) ++shift_;
        factor_ = static_cast<std::uint32_t>(
            ((std::uint64_t{1} << 32) * ((std::uint64_t{1} << shift_) - divisor)) / divisor + 1);
    }
    FQLA_HOST_DEVICE std::uint32_t quotient(std::uint32_t x) const noexcept {
        const auto high = static_cast<std::uint32_t>((std::uint64_t{x} * factor_) >> 32);
        return (high + x) >> shift_;
    }
    FQLA_HOST_DEVICE std::uint32_t remainder(std::uint32_t x, std::uint32_t its_quotient) const noexcept {
        return x - its_quotient * divisor_;
    }

private:
    std::uint32_t divisor_ = 1, factor_ = 1, shift_ = 0;
};

}  // namespace flashqla::cuda
