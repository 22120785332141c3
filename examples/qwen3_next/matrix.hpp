// A weight matrix of a linear layer, packed once for a product that reads it in order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

// Functions compiled for several instruction sets; the loader picks one. Sanitizers start too late for such functions.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define QWEN3_CLONES [[gnu::target_clones("avx512f", "fma", "default")]]
#else
#define QWEN3_CLONES
#endif

namespace qwen3_next {

class Matrix {
public:
    Matrix() = default;
    Matrix(std::span<const float> weight, std::int64_t out, std::int64_t in);  // weight [out,in]

    std::int64_t out() const { return out_; }
    std::int64_t in() const { return in_; }

    void multiply(const float* x, std::int64_t rows, float* y) const;          // y [rows,out] = x [rows,in] W^T
    void multiply_and_add(const float* x, std::int64_t rows, float* y) const;  // y += x W^T, for the residual stream

private:
    void run(const float* x, std::int64_t rows, float* y, bool add) const;

    std::int64_t out_ = 0, in_ = 0;
    std::vector<float> panels_;  // [ceil(out/16), in, 16], zeros behind the last row
};

}  // namespace qwen3_next
