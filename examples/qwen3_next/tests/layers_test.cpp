// Matrix products, norms and the convolution against plain loops in double.
#include "layers.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "matrix.hpp"

namespace qwen3_next {
namespace {

std::vector<float> random_floats(std::int64_t count, float scale = 1) {
    static std::mt19937 random(7);
    std::normal_distribution<float> normal(0, scale);
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) value = normal(random);
    return values;
}

double silu(double x) { return x / (1 + std::exp(-x)); }

TEST(Matrix, EqualsThePlainProduct) {
    for (const std::int64_t rows : {1, 2, 5, 6, 7, 13, 97, 200}) {
        for (const std::int64_t out : {1, 15, 16, 17, 40}) {
            for (const std::int64_t in : {1, 3, 64}) {
                const auto w = random_floats(out * in), x = random_floats(rows * in),
                           before = random_floats(rows * out);
                const Matrix matrix(w, out, in);
                std::vector<float> y(before.size(), NAN), sum = before;
                matrix.multiply(x.data(), rows, y.data());
                matrix.multiply_and_add(x.data(), rows, sum.data());
                for (std::int64_t t = 0; t < rows; ++t) {
                    for (std::int64_t n = 0; n < out; ++n) {
                        double expected = 0;
                        for (std::int64_t k = 0; k < in; ++k) {
                            expected += static_cast<double>(x[static_cast<std::size_t>(t * in + k)]) *
                                        w[static_cast<std::size_t>(n * in + k)];
                        }
                        const auto at = static_cast<std::size_t>(t * out + n);
                        ASSERT_NEAR(y[at], expected, 1e-4) << rows << " " << out << " " << in;
                        ASSERT_NEAR(sum[at], expected + before[at], 1e-4) << rows << " " << out << " " << in;
                    }
                }
            }
        }
    }
}

TEST(Layers, RmsNorm) {
    const auto x = random_floats(3 * 37), factor = random_floats(37);
    std::vector<float> y(x.size());
    rms_norm(x.data(), factor.data(), 3, 37, 1e-2f, y.data());
    for (std::size_t t = 0; t < 3; ++t) {
        double square = 0;
        for (std::size_t i = 0; i < 37; ++i) square += static_cast<double>(x[t * 37 + i]) * x[t * 37 + i];
        for (std::size_t i = 0; i < 37; ++i) {
            EXPECT_NEAR(y[t * 37 + i], x[t * 37 + i] / std::sqrt(square / 37 + 1e-2) * factor[i], 1e-5);
        }
    }
}

TEST(Layers, SiluOfEverySize) {
    std::vector<float> gate_up;
    for (float x = -120; x < 120; x += 0.01f) gate_up.push_back(x);
    const std::size_t size = gate_up.size();
    gate_up.resize(2 * size, 1.0f);
    std::vector<float> y(size);
    silu_times_up(gate_up.data(), 1, static_cast<std::int64_t>(size), y.data());
    for (std::size_t i = 0; i < size; ++i) {
        const double expected = silu(gate_up[i]);
        EXPECT_NEAR(y[i], expected, 1e-6 * std::abs(expected) + 1e-35) << gate_up[i];
    }
}

TEST(Layers, GatedNormNormsBeforeItGates) {
    constexpr std::size_t kHeads = 2, kSize = 19;
    const auto z = random_floats(60), weight = random_floats(kSize);
    const auto before = random_floats(kHeads * kSize);
    auto o = before;
    gated_rms_norm(o.data(), z.data(), 60, weight.data(), 1, kHeads, kSize, 1e-6f);
    for (std::size_t h = 0; h < kHeads; ++h) {
        double square = 0;
        for (std::size_t i = 0; i < kSize; ++i) square += std::pow(before[h * kSize + i], 2);
        for (std::size_t i = 0; i < kSize; ++i) {
            const std::size_t at = h * kSize + i;
            EXPECT_NEAR(o[at], before[at] / std::sqrt(square / kSize + 1e-6) * weight[i] * silu(z[at]), 1e-5);
        }
    }
}

TEST(Layers, ConvolutionInPieces) {
    constexpr std::int64_t kRows = 40, kChannels = 21, kStride = 30;
    for (const std::int64_t width : {1, 2, 4, 5}) {
        const auto weight = random_floats(width * kChannels), x = random_floats(kRows * kStride);
        const Convolution convolution{weight.data(), width, kChannels};
        std::vector<float> history(static_cast<std::size_t>((width - 1) * kChannels)), y(kRows * kChannels);
        std::int64_t at = 0;
        for (const std::int64_t length : {1, 2, 1, 3, 30, 1, 2}) {
            convolve(convolution, x.data() + at * kStride, kStride, length, history.data(), y.data() + at * kChannels);
            at += length;
        }
        ASSERT_EQ(at, kRows);
        for (std::int64_t t = 0; t < kRows; ++t) {
            for (std::int64_t c = 0; c < kChannels; ++c) {
                double sum = 0;
                for (std::int64_t j = 0; j < width; ++j) {
                    const std::int64_t from = t - width + 1 + j;
                    if (from < 0) continue;
                    sum += static_cast<double>(weight[static_cast<std::size_t>(j * kChannels + c)]) *
                           x[static_cast<std::size_t>(from * kStride + c)];
                }
                EXPECT_NEAR(y[static_cast<std::size_t>(t * kChannels + c)], silu(sum), 1e-5);
            }
        }
    }
}

}  // namespace
}  // namespace qwen3_next
