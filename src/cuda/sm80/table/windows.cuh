// How far back the state at a cut depends on what came before (params.hpp), by a block: a warp sums the gates of a
// chunk; of the keys, only those of the chunks that the gates alone would need, and one more, are looked at. Latency is
// all that it takes, so loads go out together.
#pragma once

#include "cuda/device/gates.cuh"
#include "cuda/device/memory.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/sm80/table/params.hpp"

namespace flashqla::cuda::sm80 {

inline constexpr int kTableThreads = 512;

struct WindowShared {
    float decay[kMostWindow];   // sum of g over the chunk that lies so many before the cut
    float growth[kMostWindow];  // the same of log max(1, |1 - beta k.k|)
    float square[kMostWindow][64];
};

class CutWindow {
    static constexpr int kWarps = kTableThreads / 32, kChunk = 64;
    static_assert(kWarps >= kMostWindow);

public:
    // `cut`: the segment's first token, of row `batch` of the tensors; `before`: chunks of the sequence before it.
    __device__ __forceinline__ CutWindow(const Inputs& in, WindowShared& shared, std::int64_t batch, std::int64_t cut,
                                         std::int32_t before, std::int32_t head)
        : in_(in), shared_(shared), batch_(batch), cut_(cut), chunks_(min(before, kMostWindow)), head_(head) {}

    // For all threads of the block.
    __device__ __forceinline__ std::int32_t length() {
        const int c = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
        std::uint32_t g[2] = {}, beta[2] = {};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (c >= chunks_) continue;
            const std::int64_t t = cut_ - (c + 1) * kChunk + lane + 32 * j;
            if (in_.g) g[j] = load_bits(in_.g.data, in_.g.dtype, in_.g.offset(batch_, t, head_));
            if (in_.beta) beta[j] = load_bits(in_.beta.data, in_.beta.dtype, in_.beta.offset(batch_, t, head_));
        }
        if (c < chunks_) {
            const HeadGate gate(in_, head_);
            const float sum = in_.g ? warp_sum(gate.log_decay(in_, g[0]) + gate.log_decay(in_, g[1])) : 0.0f;
            if (lane == 0) shared_.decay[c] = sum;
        }
        __syncthreads();
        const std::int32_t by_gates = first_below(chunks_, false);
        const int looked_at = by_gates == kWholePast ? 0 : min(by_gates + 1, chunks_);
        if (!in_.problem.qk_l2norm) look_at_keys(looked_at);
        __syncthreads();
        if (c < looked_at) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float square = in_.problem.qk_l2norm ? 1.0f : shared_.square[c][lane + 32 * j];
                const float left = fabsf(1.0f - beta_of(in_, beta[j]) * square);
                sum += left <= 1.0f ? 0.0f : logf(left);
            }
            sum = warp_sum(sum);
            if (lane == 0) shared_.growth[c] = sum;
        }
        __syncthreads();
        const std::int32_t length = first_below(looked_at, true);
        __syncthreads();
        return length;
    }

private:
    // NOTE: NaN is not below anything, and needs everything.
    __device__ __forceinline__ std::int32_t first_below(int chunks, bool with_growth) const {
        float sum = 0.0f;
#pragma unroll 1
        for (int c = 0; c < chunks; ++c) {
            sum += shared_.decay[c] + (with_growth ? shared_.growth[c] : 0.0f);
            if (sum <= kForgotten) return c + 1;
        }
        return kWholePast;
    }

    // k.k of each token. So many lanes take a row, and eight rows at a time.
    __device__ __forceinline__ void look_at_keys(int chunks) {
        constexpr int kLanes = 16, kRows = kTableThreads / kLanes, kAtOnce = 8;
        const int part = static_cast<int>(threadIdx.x) % kLanes, rows = chunks * kChunk;
#pragma unroll 1
        for (int first = static_cast<int>(threadIdx.x) / kLanes; first < rows; first += kAtOnce * kRows) {
            float square[kAtOnce];
            squares_of(square, first, rows, part);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int row = first + i * kRows;
                const float sum = sum_lanes<1, kLanes>(square[i]);
                if (part == 0 && row < rows) shared_.square[row / kChunk][row % kChunk] = sum;
            }
        }
    }
    // NOTE: rows past the last one are the last one again, so that no load waits for a comparison.
    template <int kAtOnce>
    __device__ __forceinline__ void squares_of(float (&square)[kAtOnce], int first, int rows, int part) const {
        constexpr int kLanes = 16, kRows = kTableThreads / kLanes;
        const std::int32_t key_head = in_.key_head(head_), K = in_.problem.dim_k;
        std::int64_t at[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int row = min(first + i * kRows, rows - 1);
            at[i] = in_.k.offset(batch_, cut_ - (row / kChunk + 1) * kChunk + row % kChunk, key_head);
            square[i] = 0.0f;
        }
        with_type(in_.problem.io, in_.k.data, [&]<class T>(T* data) {
            bool fours = K % 8 == 0;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) fours = fours && fours_are_aligned(data + at[i]);
            if (fours) {
#pragma unroll 1
                for (int n = 8 * part; n < K; n += 8 * kLanes) {
                    Four<T> x[kAtOnce][2];
#pragma unroll
                    for (int i = 0; i < 2 * kAtOnce; ++i) {
                        x[i / 2][i % 2] = *reinterpret_cast<const Four<T>*>(data + at[i / 2] + n + i % 2 * 4);
                    }
#pragma unroll
                    for (int i = 0; i < 2 * kAtOnce; ++i)
#pragma unroll
                        for (const T& e : x[i / 2][i % 2].x) {
                            square[i / 2] = fmaf(to_float(e), to_float(e), square[i / 2]);
                        }
                }
            } else {
#pragma unroll 1
                for (int n = part; n < K; n += kLanes)
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i) {
                        const float e = to_float(data[at[i] + n]);
                        square[i] = fmaf(e, e, square[i]);
                    }
            }
        });
    }

    const Inputs& in_;
    WindowShared& shared_;
    const std::int64_t batch_, cut_;
    const int chunks_;  // before the cut, those that can be looked at
    const std::int32_t head_;
};

}  // namespace flashqla::cuda::sm80
