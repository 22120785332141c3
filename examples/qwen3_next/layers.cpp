#include "layers.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "matrix.hpp"

namespace qwen3_next {
namespace {

constexpr std::int64_t kParallelRows = 16;  // below that, threads cost more than they give

// exp without a call, so that loops over it become SIMD code; within 2 ulp. The result is clamped to normal numbers.
[[gnu::always_inline]] inline float fast_exp(float x) {
    x = std::min(88.0f, std::max(-87.0f, x));
    const float shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to a whole number, in the low bits
    const float n = shifted - 12582912.0f;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts; |r| <= ln(2) / 2
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return std::bit_cast<float>(std::bit_cast<std::int32_t>(p) + (std::bit_cast<std::int32_t>(shifted) << 23));
}

[[gnu::always_inline]] inline float silu(float x) { return x / (1.0f + fast_exp(-x)); }

QWEN3_CLONES void norm_row(const float* x, const float* factor, std::int64_t size, float eps, float* y) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = 0; i < size; ++i) sum += x[i] * x[i];
    const float inverse = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
#pragma omp simd
    for (std::int64_t i = 0; i < size; ++i) y[i] = x[i] * inverse * factor[i];
}

QWEN3_CLONES void silu_row(const float* gate, const float* factor, std::int64_t size, float* y) {
#pragma omp simd
    for (std::int64_t i = 0; i < size; ++i) y[i] = silu(gate[i]) * factor[i];
}

QWEN3_CLONES void convolve_row(const Convolution& c, const float* const* taps, float* y) {
    const std::int64_t channels = c.channels;
#pragma omp simd
    for (std::int64_t i = 0; i < channels; ++i) y[i] = c.weight[i] * taps[0][i];
    for (std::int64_t j = 1; j < c.width; ++j) {
        const float* weight = c.weight + j * channels;
        const float* tap = taps[j];
#pragma omp simd
        for (std::int64_t i = 0; i < channels; ++i) y[i] += weight[i] * tap[i];
    }
#pragma omp simd
    for (std::int64_t i = 0; i < channels; ++i) y[i] = silu(y[i]);
}

}  // namespace

void rms_norm(const float* x, const float* factor, std::int64_t rows, std::int64_t size, float eps, float* y) {
#pragma omp parallel for schedule(static) if (rows > kParallelRows)
    for (std::int64_t t = 0; t < rows; ++t) norm_row(x + t * size, factor, size, eps, y + t * size);
}

void silu_times_up(const float* gate_up, std::int64_t rows, std::int64_t size, float* y) {
#pragma omp parallel for schedule(static) if (rows > kParallelRows)
    for (std::int64_t t = 0; t < rows; ++t) {
        silu_row(gate_up + 2 * t * size, gate_up + (2 * t + 1) * size, size, y + t * size);
    }
}

void gated_rms_norm(float* o, const float* z, std::int64_t z_stride, const float* weight, std::int64_t rows,
                    std::int64_t heads, std::int64_t size, float eps) {
#pragma omp parallel for schedule(static) if (rows > kParallelRows)
    for (std::int64_t t = 0; t < rows; ++t) {
        for (std::int64_t h = 0; h < heads; ++h) {
            float* head = o + (t * heads + h) * size;
            norm_row(head, weight, size, eps, head);
            silu_row(z + t * z_stride + h * size, head, size, head);
        }
    }
}

void convolve(const Convolution& convolution, const float* x, std::int64_t x_stride, std::int64_t rows, float* history,
              float* y) {
    const std::int64_t before = convolution.width - 1, channels = convolution.channels;
    // Row t of the piece, or of what came before it.
    const auto row = [=](std::int64_t t) { return t < 0 ? history + (before + t) * channels : x + t * x_stride; };
#pragma omp parallel for schedule(static) if (rows > kParallelRows)
    for (std::int64_t t = 0; t < rows; ++t) {
        const float* taps[kMaxConvolutionWidth];
        for (std::int64_t j = 0; j <= before; ++j) taps[j] = row(t - before + j);
        convolve_row(convolution, taps, y + t * channels);
    }
    // NOTE: upwards, since a piece shorter than the history shifts rows within it.
    for (std::int64_t i = 0; i < before; ++i) std::copy_n(row(rows - before + i), channels, history + i * channels);
}

}  // namespace qwen3_next
