// Those who walk find, before anything else, how far back the states at the cuts depend on what came before
// (chunk_params.hpp), a cut of a value head at a time: a warp sums the gates of a chunk; of the keys, only those of the
// chunks that the gates alone would need, and one more, are looked at. Latency is all that it takes, so loads go out
// together.
#pragma once

#include "cuda/device/arrivals.cuh"
#include "cuda/device/chunks.cuh"
#include "cuda/device/gates.cuh"
#include "cuda/device/memory.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/sm90/forward/config.cuh"

namespace flashqla::cuda::sm90 {

// Where outputs are else.
struct WindowShared {
    std::uint32_t taken;        // the cut that the block is at
    float decay[kMostWindow];   // sum of g over the chunk that lies so many before the cut
    float growth[kMostWindow];  // the same of log max(1, |1 - beta k.k|)
    float square[kMostWindow][64];
};

template <class Config>
class WindowFinder {
    static constexpr int kThreads = Config::kWalkers, kWarps = kThreads / 32, kChunk = Config::kChunk;
    static constexpr int kEach = (kMostWindow + kWarps - 1) / kWarps;  // chunks of a warp
    static_assert(sizeof(WindowShared) <= sizeof(ForwardShared<Config>::outputs));

    // The tokens before a cut.
    struct Past {
        std::int64_t batch, cut;  // the row of the tensors, the first token behind
        std::int32_t chunks;      // that can be looked at
        std::int32_t head;

        __device__ __forceinline__ std::int64_t token(int chunk, int i) const { return cut - (chunk + 1) * kChunk + i; }
    };

public:
    __device__ __forceinline__ WindowFinder(const ForwardParams& params, ForwardShared<Config>& shared)
        : params_(params), in_(params.call), shared_(reinterpret_cast<WindowShared&>(shared.outputs)) {}

    // Each window is its own announcement: one that is not known yet is kUnknown.
    __device__ __forceinline__ void run(std::int32_t segments) {
        const auto heads = static_cast<std::uint32_t>(in_.problem.heads_v);
        const std::uint32_t cuts = static_cast<std::uint32_t>(segments) * heads;
#pragma unroll 1
        for (;;) {
            if (threadIdx.x == 0) shared_.taken = atomicAdd(params_.table.taken + kWindowsTaken, 1u);
            meet();
            const std::uint32_t i = shared_.taken;
            if (i >= cuts) break;
            const SegmentRecord segment = params_.table.records[i / heads];
            std::int32_t window = kWholePast;
            if (segment.index > 0) {
                window = length({in_.cu_seqlens ? 0 : segment.n, segment.begin + segment.first_token,
                                 min(segment.first_token / kChunk, kMostWindow), static_cast<std::int32_t>(i % heads)});
            }
            if (threadIdx.x == 0) publish(params_.states.windows + i, window);
            meet();
        }
    }

private:
    static __device__ __forceinline__ void meet() { sync_threads<Config::kMeeting, kThreads>(); }

    __device__ __forceinline__ std::int32_t length(const Past& past) {
        const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
        std::uint32_t g[kEach][2] = {}, beta[kEach][2] = {};
#pragma unroll
        for (int i = 0; i < kEach; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int c = warp + i * kWarps;
                if (c >= past.chunks) continue;
                const std::int64_t t = past.token(c, lane + 32 * j);
                if (in_.g) g[i][j] = load_bits(in_.g.data, in_.g.dtype, in_.g.offset(past.batch, t, past.head));
                if (in_.beta) {
                    beta[i][j] = load_bits(in_.beta.data, in_.beta.dtype, in_.beta.offset(past.batch, t, past.head));
                }
            }
        const HeadGate gate(in_, past.head);
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int c = warp + i * kWarps;
            if (c >= past.chunks) continue;
            const float sum = in_.g ? warp_sum(gate.log_decay(in_, g[i][0]) + gate.log_decay(in_, g[i][1])) : 0.0f;
            if (lane == 0) shared_.decay[c] = sum;
        }
        meet();
        const std::int32_t by_gates = first_below(past.chunks, false);
        const int looked_at = by_gates == kWholePast ? 0 : min(by_gates + 1, past.chunks);
        if (!in_.problem.qk_l2norm) look_at_keys(past, looked_at);
        meet();
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int c = warp + i * kWarps;
            if (c >= looked_at) continue;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float square = in_.problem.qk_l2norm ? 1.0f : shared_.square[c][lane + 32 * j];
                const float left = fabsf(1.0f - beta_of(in_, beta[i][j]) * square);
                sum += left <= 1.0f ? 0.0f : logf(left);
            }
            sum = warp_sum(sum);
            if (lane == 0) shared_.growth[c] = sum;
        }
        meet();
        return first_below(looked_at, true);
    }

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
    static constexpr int kLanes = 16, kRows = kThreads / kLanes, kAtOnce = 8;
    __device__ __forceinline__ void look_at_keys(const Past& past, int chunks) {
        const int part = static_cast<int>(threadIdx.x) % kLanes, rows = chunks * kChunk;
#pragma unroll 1
        for (int first = static_cast<int>(threadIdx.x) / kLanes; first < rows; first += kAtOnce * kRows) {
            float square[kAtOnce];
            squares_of(square, past, first, rows, part);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int row = first + i * kRows;
                const float sum = sum_lanes<1, kLanes>(square[i]);
                if (part == 0 && row < rows) shared_.square[row / kChunk][row % kChunk] = sum;
            }
        }
    }
    // NOTE: rows past the last one are the last one again, so that no load waits for a comparison.
    __device__ __forceinline__ void squares_of(float (&square)[kAtOnce], const Past& past, int first, int rows,
                                               int part) const {
        const std::int32_t key_head = in_.key_head(past.head), K = in_.problem.dim_k;
        std::int64_t at[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int row = min(first + i * kRows, rows - 1);
            at[i] = in_.k.offset(past.batch, past.token(row / kChunk, row % kChunk), key_head);
            square[i] = 0.0f;
        }
        using Input = typename Config::Op::Input;
        const auto* data = static_cast<const Input*>(in_.k.data);
        bool fours = K % 8 == 0;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) fours = fours && fours_are_aligned(data + at[i]);
        if (fours) {
#pragma unroll 1
            for (int n = 8 * part; n < K; n += 8 * kLanes) {
                Four<Input> x[kAtOnce][2];
#pragma unroll
                for (int i = 0; i < 2 * kAtOnce; ++i) {
                    x[i / 2][i % 2] = *reinterpret_cast<const Four<Input>*>(data + at[i / 2] + n + i % 2 * 4);
                }
#pragma unroll
                for (int i = 0; i < 2 * kAtOnce; ++i)
#pragma unroll
                    for (const Input& e : x[i / 2][i % 2].x)
                        square[i / 2] = fmaf(to_float(e), to_float(e), square[i / 2]);
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
    }

    const ForwardParams& params_;
    const ForwardCall& in_;
    WindowShared& shared_;
};

}  // namespace flashqla::cuda::sm90
