// A block owns 16 columns of V of one (sequence, head), as 16 rows of S^T, and walks over the cuts:
//
//   S'^T[v][n] = E^T[v][n] + sum_k S^T[v][k] M^T[k][n]
//
// or, for gradients, from the last cut to the first: D'^T[v][n] = D*^T[v][n] + sum_k D^T[v][k] M^T[n][k].
//
// A quarter of its threads takes a quarter of the sum, a thread one key n of the new rows, so that all of M is on its
// way at once: latency is what a step takes.
#pragma once

#include "cuda/device/chunks.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/sm80/carry/params.hpp"

namespace flashqla::cuda::sm80 {

template <int kK_>
struct CarryConfig {
    static constexpr int kK = kK_;  // keys, the last ones unused when dim_k is smaller
    static constexpr int kParts = 4, kEach = kK / kParts, kThreads = kK * kParts;
    static constexpr int kRows = kCarryRows, kRowsEach = kRows / kParts;
    static constexpr int kAhead = kK == 128 ? 32 : 16;  // elements of M that a thread asks for at a time
};

template <class Config>
struct CarryShared {
    alignas(16) float state[Config::kK][Config::kRows];  // S^T, turned: [k][v]
    float sums[Config::kParts][Config::kRows][Config::kK];
};

template <class Config, bool kBack>
__global__ void __launch_bounds__(Config::kThreads) carry_kernel(const __grid_constant__ CarryParams params) {
    auto& shared = shared_block<CarryShared<Config>>();
    const Problem& p = params.in.problem;
    const std::int64_t tiles = pieces(p.dim_v, Config::kRows);
    const std::int64_t v0 = blockIdx.x % tiles * Config::kRows, item = blockIdx.x / tiles;
    const std::int64_t head = item % p.heads_v, n = item / p.heads_v;
    const int key = static_cast<int>(threadIdx.x) % Config::kK, part = static_cast<int>(threadIdx.x) / Config::kK;
    const int K = p.dim_k, V = p.dim_v;

    std::int64_t first, count;  // segments of the sequence
    if (params.table.segments) {
        first = params.table.segments[n];
        count = params.table.segments[n + 1] - first;
    } else {
        const std::int64_t chunks = pieces(p.tokens, params.table.chunk);
        count = chunks > 0 ? pieces(chunks, params.table.segment_chunks) : 1;
        first = n * count;
    }
    for (std::int64_t step = 0; step + 1 < count; ++step) {
        const std::int64_t row = (first + (kBack ? count - 1 - step : step)) * p.heads_v + head;
        const float* states = params.states.ends + row * (V + K) * K;
        const float* end = kBack ? params.adjoints.starts + row * V * K : states;
        const float* transition = states + std::int64_t(V) * K;
        float own[Config::kRowsEach];
#pragma unroll
        for (int i = 0; i < Config::kRowsEach; ++i) {
            const std::int64_t v = v0 + part * Config::kRowsEach + i;
            own[i] = key < K && v < V ? end[v * K + key] : 0.0f;
        }
        if (step > 0) {
            float sum[Config::kRows] = {};
#pragma unroll
            for (int k0 = 0; k0 < Config::kEach; k0 += Config::kAhead) {
                float m[Config::kAhead];
#pragma unroll
                for (int i = 0; i < Config::kAhead; ++i) {
                    const int k = part * Config::kEach + k0 + i;
                    m[i] = key < K && k < K ? transition[kBack ? std::int64_t(key) * K + k : std::int64_t(k) * K + key]
                                            : 0.0f;
                }
#pragma unroll
                for (int i = 0; i < Config::kAhead; ++i) {
                    const float* state = shared.state[part * Config::kEach + k0 + i];
#pragma unroll
                    for (int v = 0; v < Config::kRows; v += 4) {
                        const float4 x = *reinterpret_cast<const float4*>(state + v);
                        sum[v] = fmaf(x.x, m[i], sum[v]);
                        sum[v + 1] = fmaf(x.y, m[i], sum[v + 1]);
                        sum[v + 2] = fmaf(x.z, m[i], sum[v + 2]);
                        sum[v + 3] = fmaf(x.w, m[i], sum[v + 3]);
                    }
                }
            }
#pragma unroll
            for (int v = 0; v < Config::kRows; ++v) shared.sums[part][v][key] = sum[v];
            __syncthreads();
#pragma unroll
            for (int i = 0; i < Config::kRowsEach; ++i) {
#pragma unroll
                for (int other = 0; other < Config::kParts; ++other) {
                    own[i] += shared.sums[other][part * Config::kRowsEach + i][key];
                }
            }
        }
        float* to =
            kBack ? params.adjoints.ends + (row - p.heads_v) * V * K : params.states.starts + (row + p.heads_v) * V * K;
#pragma unroll
        for (int i = 0; i < Config::kRowsEach; ++i) {
            const int v = part * Config::kRowsEach + i;
            shared.state[key][v] = own[i];
            if (key < K && v0 + v < V) to[(v0 + v) * K + key] = own[i];
        }
        __syncthreads();
    }
}

}  // namespace flashqla::cuda::sm80
