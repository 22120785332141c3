// What a Qwen3-Next layer computes besides matrix products and the gated delta rule. All in fp32.
#pragma once

#include <cstdint>

namespace qwen3_next {

// y = x / sqrt(mean(x^2) + eps) * factor, row by row. Qwen3-Next stores factor - 1 for its layer norms.
void rms_norm(const float* x, const float* factor, std::int64_t rows, std::int64_t size, float eps, float* y);

// y [rows,size] = silu(gate) * up, where gate_up [rows, 2 size] = gate | up.
void silu_times_up(const float* gate_up, std::int64_t rows, std::int64_t size, float* y);

// o [rows,heads,size] = rms_norm(o; weight) * silu(z), in place. Rows of z are z_stride apart.
void gated_rms_norm(float* o, const float* z, std::int64_t z_stride, const float* weight, std::int64_t rows,
                    std::int64_t heads, std::int64_t size, float eps);

// Depthwise causal convolution and silu for one piece of one sequence:
//   y_t = silu(sum_j weight[j] x_{t-width+1+j}),   history [width-1,channels] = the rows before x.
// Rows of x are x_stride apart. Afterwards history holds the last width-1 rows, for the piece that follows.
inline constexpr std::int64_t kMaxConvolutionWidth = 16;
struct Convolution {
    const float* weight;  // [width,channels]
    std::int64_t width, channels;
};
void convolve(const Convolution& convolution, const float* x, std::int64_t x_stride, std::int64_t rows, float* history,
              float* y);

}  // namespace qwen3_next
