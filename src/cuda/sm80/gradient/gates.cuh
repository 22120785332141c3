// The gradients of gates and beta: what a chunk knows of each token, then the sums over tokens.
#pragma once

#include "cuda/device/chunks.cuh"
#include "cuda/device/gates.cuh"
#include "cuda/device/grid_order.cuh"
#include "cuda/sm80/gradient/config.cuh"

namespace flashqla::cuda::sm80 {

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <int kCount, int kChunk>
__device__ __forceinline__ float over_sides(const float (&x)[kCount][kChunk], int i) {
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < kCount; ++s) sum += x[s][i];
    return sum;
}

// Of a token, or of a part of what a token's sums are taken over. `query` is query_i <q_i, (dO S^T)_i>, `read` is
// <W'_i, e_i U_i>; `outputs` and `system` are sums over the row of H, with P' and with L' without beta.
__device__ __forceinline__ double gamma_of_token(float query, float read, float outputs, float system, float beta) {
    return static_cast<double>(query) + static_cast<double>(outputs) - static_cast<double>(beta * read) +
           static_cast<double>(beta * system);
}
// `value` is <W'_i, v_i>.
__device__ __forceinline__ float beta_of_token(float value, float read, float system) { return value - read + system; }

// From those two; `leaves` are H_ji of later tokens j, `keep` is keep_i <k_i, (X D^T)_i>, `along` what the whole decay
// of the chunk gives, exp(gamma_C) <D, S>. `last`: the chunk's last token, whose own way to the end of the chunk would
// be subtracted from itself; it stands for the chunk's whole decay instead.
__device__ __forceinline__ TokenGradient gradient_of_token(double gamma, float beta, double leaves, float keep,
                                                           double along, bool last) {
    TokenGradient d;
    d.beta = beta;
    d.gamma = gamma - leaves;
    d.to_end = last ? static_cast<float>(along) : keep;
    if (!last) d.gamma -= static_cast<double>(keep);
    return d;
}

// From what the block has left in shared memory.
template <class Config>
__device__ __forceinline__ TokenGradient gradient_of_token(const GradientShared<Config>& shared,
                                                           const RowFactors<Config::kChunk>& f, int i, bool last) {
    const int block = i / 16, r = i % 16;
    float outputs = 0.0f, system = 0.0f;
    double leaves = 0.0, along = 0.0;
#pragma unroll
    for (int b = 0; b < Config::kBlocks; ++b) {
        if (b <= block) {
            const int at = block * (block + 1) / 2 + b;
            outputs += shared.rows[0][at][r];
            system += shared.rows[1][at][r];
        }
        if (b >= block) {
            const int at = b * (b + 1) / 2 + block;
            leaves += static_cast<double>(shared.columns[0][at][r]) + static_cast<double>(shared.columns[1][at][r]);
        }
    }
    if (last) {
#pragma unroll
        for (int w = 0; w < Config::kWarps; ++w) along += static_cast<double>(shared.along[w]);
        along *= static_cast<double>(f.total[0]);
    }
    const float read = expf(f.high[i] + f.low[i]) * f.norm_k[i] * over_sides(shared.read_dots, i);
    return gradient_of_token(
        gamma_of_token(f.query[i] * over_sides(shared.query_dots, i), read, outputs, system, f.beta[i]),
        beta_of_token(over_sides(shared.value_dots, i), read, system), leaves,
        f.keep[i] * over_sides(shared.keep_dots, i), along, last);
}

// The sum over this lane and those after it.
__device__ __forceinline__ double warp_suffix(double x) {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const double other = __shfl_down_sync(kFullWarp, x, step);
        if (lane + step < 32) x += other;
    }
    return x;
}

// By one warp.
template <int kChunk>
__device__ __forceinline__ void finish_gates(const GatesParams& params, const Chunk& chunk, std::int64_t at,
                                             std::int32_t head) {
    constexpr int kEach = kChunk / 32;  // tokens of a lane, neighbours
    const BackwardCall& call = params.call;
    const Problem& p = call.problem;
    const int lane = static_cast<int>(threadIdx.x % 32);

    TokenGradient d[kEach];
    double to_end = 0.0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        const int i = kEach * lane + j;
        d[j] = i < chunk.tokens ? params.tokens[at * kChunk + i] : TokenGradient{0.0, 0.0f, 0.0f};
        to_end += static_cast<double>(d[j].to_end);
    }
    to_end = warp_sum(to_end);

    double own = 0.0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        if (kEach * lane + j + 1 == chunk.tokens) d[j].gamma += to_end;
        own += d[j].gamma;
    }
    double suffix = warp_suffix(own);  // of this lane's first token

    const HeadGate gate(call, head);
    double d_A_log = 0.0, d_dt_bias = 0.0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        const int i = kEach * lane + j;
        if (i < chunk.tokens) {
            const std::int64_t t = chunk.begin + i;
            if (call.g) {
                const std::uint32_t bits = load_bits(call.g.data, call.g.dtype, call.g.offset(chunk.batch, t, head));
                double d_g = gate.decay(call, bits) == 0.0f ? 0.0 : suffix;
                if (p.gate == Gate::raw) {
                    d_A_log += d_g == 0.0 ? 0.0 : d_g * static_cast<double>(gate.log_decay(call, bits));
                    d_g *= static_cast<double>(-gate.rate * sigmoid(float_of_bits(bits, call.g.dtype) + gate.bias));
                    d_dt_bias += d_g;
                }
                if (call.d_g) {
                    store_element(call.d_g.data, call.d_g.dtype, call.d_g.offset(chunk.batch, t, head),
                                  static_cast<float>(d_g));
                }
            }
            if (call.d_beta) {
                float d_b = p.beta_factor * d[j].beta;
                if (p.beta_mode == BetaMode::logit) {
                    const float s =
                        sigmoid(load_element(call.beta.data, call.beta.dtype, call.beta.offset(chunk.batch, t, head)));
                    d_b *= s * (1.0f - s);
                }
                store_element(call.d_beta.data, call.d_beta.dtype, call.d_beta.offset(chunk.batch, t, head), d_b);
            }
        }
        suffix -= d[j].gamma;
    }
    if (params.d_A_log) {
        d_A_log = warp_sum(d_A_log);
        d_dt_bias = warp_sum(d_dt_bias);
        if (lane == 0) {
            params.d_A_log[at] = d_A_log;
            params.d_dt_bias[at] = d_dt_bias;
        }
    }
}

inline constexpr int kGatesThreads = 128;

template <int kChunk>
__global__ void __launch_bounds__(kGatesThreads) gates_kernel(const __grid_constant__ GatesParams params) {
    wait_for_earlier_grids();
    const std::int64_t at = std::int64_t(blockIdx.x) * (kGatesThreads / 32) + threadIdx.x / 32;
    if (at >= params.warps) return;
    const std::int32_t heads = params.call.problem.heads_v;
    const Chunk chunk = chunk_of(params.call, params.table, at / heads);
    if (chunk.tokens > 0) finish_gates<kChunk>(params, chunk, at, static_cast<std::int32_t>(at % heads));
}

}  // namespace flashqla::cuda::sm80
