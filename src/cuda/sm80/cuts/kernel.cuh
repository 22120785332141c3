// A block takes a (segment, value head) at a time: a warp sums the gates of a chunk; of the keys, only those of the
// chunks that the gates alone would need, and one more, are looked at.
#pragma once

#include "cuda/device/chunks.cuh"
#include "cuda/device/gates.cuh"
#include "cuda/device/grid_order.cuh"
#include "cuda/device/memory.cuh"
#include "cuda/sm80/cuts/params.hpp"

namespace flashqla::cuda::sm80 {

inline constexpr int kCutsThreads = 256;

struct CutsShared {
    float decay[kMostWindow];   // sum of g over the chunk that lies so many before the cut
    float growth[kMostWindow];  // the same of log max(1, |1 - beta k.k|)
    float of_token[kMostWindow][64];
};

class CutWindow {
    static constexpr int kWarps = kCutsThreads / 32, kChunk = 64;

public:
    __device__ __forceinline__ CutWindow(const CutsParams& params, CutsShared& shared, const Segment& segment,
                                         std::int32_t head)
        : in_(params.in), shared_(shared), span_(clamped_span(params.in, segment.n)), head_(head) {
        cut_ = span_.begin + segment.first_token;
        const std::int64_t before = segment.first_token / kChunk;
        chunks_ = before < kMostWindow ? static_cast<int>(before) : kMostWindow;
    }

    // For all threads of the block.
    __device__ __forceinline__ std::int32_t length() {
        const HeadGate gate(in_, head_);
        for (int c = warp(); c < chunks_; c += kWarps) {
            const float sum = warp_sum(decay_of(gate, token(c)) + decay_of(gate, token(c) + 32));
            if (lane() == 0) shared_.decay[c] = sum;
        }
        __syncthreads();
        const std::int32_t by_gates = first_below(chunks_, false);
        const int looked_at = by_gates == kWholePast ? 0 : min(by_gates + 1, chunks_);
        look_at_keys(looked_at);
        __syncthreads();
        for (int c = warp(); c < looked_at; c += kWarps) {
            const float sum = warp_sum(shared_.of_token[c][lane()] + shared_.of_token[c][lane() + 32]);
            if (lane() == 0) shared_.growth[c] = sum;
        }
        __syncthreads();
        const std::int32_t length = first_below(looked_at, true);
        __syncthreads();
        return length;
    }

private:
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
    static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x / 32); }
    // The lane's first token of the chunk that lies c + 1 before the cut.
    __device__ __forceinline__ std::int64_t token(int c) const { return cut_ - (c + 1) * kChunk + lane(); }

    __device__ __forceinline__ float decay_of(const HeadGate& gate, std::int64_t t) const {
        if (!in_.g) return 0.0f;
        return gate.log_decay(in_, load_bits(in_.g.data, in_.g.dtype, in_.g.offset(span_.batch, t, head_)));
    }

    // NOTE: NaN is not below anything, and needs everything.
    __device__ __forceinline__ std::int32_t first_below(int chunks, bool with_growth) const {
        float sum = 0.0f;
        for (int c = 0; c < chunks; ++c) {
            sum += shared_.decay[c] + (with_growth ? shared_.growth[c] : 0.0f);
            if (sum <= kForgotten) return c + 1;
        }
        return kWholePast;
    }

    // Growth of each token. A group of lanes takes a row of k.
    __device__ __forceinline__ void look_at_keys(int chunks) {
        constexpr int kLanes = 8;
        const int part = lane() % kLanes;
        const std::int32_t key_head = in_.key_head(head_);
        for (int row = static_cast<int>(threadIdx.x) / kLanes; row < chunks * kChunk; row += kCutsThreads / kLanes) {
            const int c = row / kChunk, i = row % kChunk;
            const std::int64_t t = cut_ - (c + 1) * kChunk + i;
            float square =
                in_.problem.qk_l2norm ? 1.0f : square_of(in_.k.offset(span_.batch, t, key_head), part, kLanes);
            if (!in_.problem.qk_l2norm) square = sum_lanes<1, kLanes>(square);
            const std::uint32_t bits =
                in_.beta ? load_bits(in_.beta.data, in_.beta.dtype, in_.beta.offset(span_.batch, t, head_)) : 0;
            const float left = fabsf(1.0f - beta_of(in_, bits) * square);
            if (part == 0) shared_.of_token[c][i] = left <= 1.0f ? 0.0f : logf(left);
        }
    }
    __device__ __forceinline__ float square_of(std::int64_t at, int part, int lanes) const {
        float sum = 0.0f;
        with_type(in_.problem.io, in_.k.data, [&]<class T>(T* data) {
            const T* row = data + at;
            if (in_.problem.dim_k % 4 == 0 && fours_are_aligned(row)) {
                for (int n = 4 * part; n < in_.problem.dim_k; n += 4 * lanes) {
                    float x[4];
                    load_four(row + n, x);
#pragma unroll
                    for (const float e : x) sum = fmaf(e, e, sum);
                }
            } else {
                for (int n = part; n < in_.problem.dim_k; n += lanes)
                    sum = fmaf(to_float(row[n]), to_float(row[n]), sum);
            }
        });
        return sum;
    }

    const Inputs& in_;
    CutsShared& shared_;
    const Span span_;
    const std::int32_t head_;
    std::int64_t cut_;  // the segment's first token
    int chunks_;        // before it, those that can be looked at
};

__global__ void __launch_bounds__(kCutsThreads) cuts_kernel(const __grid_constant__ CutsParams params) {
    __shared__ CutsShared shared;
    wait_for_earlier_grids();
    let_next_grid_start();
    if (!is_needed(params.table)) return;
    const auto heads = static_cast<std::uint32_t>(params.in.problem.heads_v);
    for (std::uint32_t i = blockIdx.x; i < params.items; i += gridDim.x) {
        const Segment segment = segment_of(params.in, params.table, i / heads);
        if (segment.n < 0) return;
        if (segment.index == 0) continue;
        const std::int32_t window = CutWindow(params, shared, segment, static_cast<std::int32_t>(i % heads)).length();
        if (threadIdx.x == 0) params.windows[i] = window;
    }
}

}  // namespace flashqla::cuda::sm80
