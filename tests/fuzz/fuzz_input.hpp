// What the fuzz targets share: bytes as a stream of choices, and the way a broken promise is reported.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace flashqla::fuzz {

// Ends the process the way a fuzzer notices, with the reason first.
[[noreturn]] inline void broken(const char* promise, const char* detail = "") {
    std::fprintf(stderr, "broken promise: %s %s\n", promise, detail);
    std::abort();
}
inline void require(bool holds, const char* promise, const char* detail = "") {
    if (!holds) broken(promise, detail);
}

// Choices taken from the input; past its end every choice is 0, which the targets give their plainest meaning.
class Bytes {
public:
    Bytes(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

    bool empty() const noexcept { return next_ >= size_; }
    std::uint8_t byte() noexcept { return next_ < size_ ? data_[next_++] : std::uint8_t{0}; }
    // In [low, high]; takes one byte, so high - low is at most 255.
    std::int64_t from(std::int64_t low, std::int64_t high) noexcept { return low + byte() % (high - low + 1); }
    // One chance in n, never at the end of the input.
    bool one_in(int n) noexcept { return byte() % n == n - 1; }
    std::uint64_t word() noexcept {
        std::uint64_t x = 0;
        for (int i = 0; i < 8; ++i) x = x << 8 | byte();
        return x;
    }
    // Numbers that break arithmetic: ends of ranges, powers of two and their neighbours, and anything.
    std::int64_t extreme() noexcept {
        switch (byte() % 6) {
            case 0: return from(-8, 8);
            case 1: return INT64_MIN + from(0, 3);
            case 2: return INT64_MAX - from(0, 3);
            case 3: return static_cast<std::int64_t>((std::uint64_t{1} << from(0, 63)) + byte() % 3 - 1);
            case 4: return -static_cast<std::int64_t>(std::uint64_t{1} << from(0, 62));
            default: return static_cast<std::int64_t>(word());
        }
    }

private:
    const std::uint8_t* data_;
    std::size_t size_, next_ = 0;
};

}  // namespace flashqla::fuzz

// libFuzzer's entry; replay_main.cpp calls it where libFuzzer does not exist.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
