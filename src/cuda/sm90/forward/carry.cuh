// The states at the cuts of a sequence, one after the other, in fp32: the group that walks has 8 columns of V of one
// value head, as rows of S^T, and for every cut
//
//   S'^T[v][n] = E^T[v][n] + sum_k S^T[v][k] M^T[k][n]
//
// with the end E and the transition M of the segment before it. A step cannot begin before the one before it has ended,
// so its latency is what counts: M comes to shared memory in the background, a step ahead, by the loader. Each warp has
// a part of the sum over k; a lane has four neighbouring n.
//
// NOTE: lies where the rows of chunks, outputs and factors are else; the loader brings no rows until it is done.
#pragma once

#include "cuda/device/arrivals.cuh"
#include "cuda/device/chunks.cuh"
#include "cuda/sm90/forward/config.cuh"

namespace flashqla::cuda::sm90 {

// The segments of a sequence that take part, for one value head. By all lanes of a warp.
class CarriedCuts {
public:
    __device__ __forceinline__ CarriedCuts(const ForwardParams& params, const ForwardItem& item, bool windows)
        : windows_(windows ? params.states.windows : nullptr),
          heads_(params.call.problem.heads_v),
          head_(item.place.head),
          first_(static_cast<std::int32_t>(item.place.number)),
          count_(item.segments) {}

    // f(row of the segment before the cut, whether it continues the cut before, step) for each cut that is carried.
    template <class F>
    __device__ __forceinline__ void each(F&& f) const {
        std::uint32_t carried = ~0u;  // of the next cuts
        bool chained = false;
#pragma unroll 1
        for (std::int32_t step = 0; step + 1 < count_; ++step) {
            if (windows_ && step % 32 == 0) carried = carried_from(step);
            const bool now = (carried >> (step % 32) & 1) != 0;
            if (now) f(row(step), chained, step);
            chained = now;
        }
    }
    __device__ __forceinline__ bool any() const {
        if (!windows_) return count_ > 1;
#pragma unroll 1
        for (std::int32_t step = 0; step + 1 < count_; step += 32) {
            if (carried_from(step) != 0) return true;
        }
        return false;
    }
    // Of a segment of the sequence, in SegmentStates.
    __device__ __forceinline__ std::int64_t row(std::int32_t index) const {
        return std::int64_t(first_ + index) * heads_ + head_;
    }

private:
    // Bit i: the cut behind segment step + i depends on its whole past.
    __device__ __forceinline__ std::uint32_t carried_from(std::int32_t step) const {
        const std::int32_t index = step + 1 + static_cast<std::int32_t>(threadIdx.x % 32);
        return __ballot_sync(kFullWarp, index < count_ && wait_for_value(windows_ + row(index)) == kWholePast);
    }

    const std::int32_t* windows_;
    const std::int32_t heads_, head_, first_, count_;
};

template <class Config>
class ForwardCarry {
    using Shared = ForwardShared<Config>;
    static constexpr int kK = Config::kK, kRows = kCarryColumns, kParts = Config::kWalkers / 32, kEach = kK / kParts;
    static constexpr int kOutputs = kRows * kK / Config::kWalkers;  // of a step, for a thread: rows of one column
    static_assert(kK == 128 && kOutputs == 4 && Config::kWalkers == 2 * kK);
    static constexpr int kSums = kRows * kK;  // floats
    static constexpr int kToldTogether = 8;   // steps
    static_assert(sizeof(Shared::rows) >= 4 * (2 * kTransitionElements + kParts / 2 * kSums));
    static_assert(sizeof(Shared::outputs) >= 4 * kParts / 2 * kSums && sizeof(Shared::factors) >= 4 * kK * kRows);

public:
    // What the loader does for it, all lanes together.
    static __device__ __forceinline__ void load(const ForwardParams& params, Shared& shared, const CarriedCuts& cuts,
                                                Turn<2>& turn) {
        const Problem& p = params.call.problem;
        cuts.each([&](std::int64_t row, bool chained, std::int32_t) {
            wait_for_count(params.states.stored_ends + row,
                           static_cast<std::uint32_t>(p.dim_v + (chained ? p.dim_k : 0)));
            const int stage = static_cast<int>(turn.stage());
            shared.carry_empty[stage].wait(turn.round() ^ 1);
            if (threadIdx.x % 32 == 0) {
                Barrier& full = shared.carry_full[stage];
                if (chained) {
                    constexpr std::uint32_t kBytes = 4 * kTransitionElements;
                    fence_for_copies();
                    full.arrive_expecting(kBytes);
                    copy_bulk(transition(shared, stage),
                              params.states.ends + row * end_elements(p) + end_state_elements(p), kBytes, full);
                } else {
                    full.arrive();
                }
            }
            __syncwarp();
            ++turn.n;
        });
    }

    // By all who walk. `turn`: as the loader's.
    static __device__ __forceinline__ void run(const ForwardParams& params, Shared& shared, const CarriedCuts& cuts,
                                               std::int32_t v0, Turn<2>& turn) {
        const Problem& p = params.call.problem;
        const int n = thread() % kK, first = thread() / kK * kOutputs;  // of this thread's outputs
        std::int32_t last = 0;
        std::uint32_t stored = 0;  // of the last cuts, those that nobody has been told of
        cuts.each([&](std::int64_t row, bool chained, std::int32_t step) {
            const int stage = static_cast<int>(turn.stage());
            shared.carry_full[stage].wait(turn.round());
            float state[kOutputs];
            const float* end = params.states.ends + row * end_elements(p) + std::int64_t(v0 + first) * p.dim_k + n;
#pragma unroll
            for (int i = 0; i < kOutputs; ++i) {
                state[i] = n < p.dim_k && v0 + first + i < p.dim_v ? end[i * p.dim_k] : 0.0f;
            }
            if (chained) {
                multiply(shared, transition(shared, stage));
                meet();
#pragma unroll
                for (int part = 0; part < kParts; ++part)
#pragma unroll
                    for (int i = 0; i < kOutputs; ++i) state[i] += sums(shared, part)[(first + i) * kK + n];
            }
            __syncwarp();
            if (lane() == 0) shared.carry_empty[stage].arrive();
            ++turn.n;
            float* to =
                params.states.starts + (row + p.heads_v) * p.dim_v * p.dim_k + std::int64_t(v0 + first) * p.dim_k + n;
#pragma unroll
            for (int i = 0; i < kOutputs; ++i) {
                if (n < p.dim_k && v0 + first + i < p.dim_v) to[i * p.dim_k] = state[i];
            }
            *reinterpret_cast<float4*>(states(shared) + n * kRows + first) = {state[0], state[1], state[2], state[3]};
            meet();
            // NOTE: some at a time, because a fence takes as long as a step.
            if (step / kToldTogether != last / kToldTogether) tell(params, cuts, v0, last, stored), stored = 0;
            stored |= 1u << step % kToldTogether;
            last = step;
        });
        tell(params, cuts, v0, last, stored);
    }

private:
    static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
    static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x / 32); }
    static __device__ __forceinline__ void meet() { sync_threads<Config::kMeeting, Config::kWalkers>(); }

    // The start states behind the cut of a step, and behind those before it.
    static __device__ __forceinline__ void tell(const ForwardParams& params, const CarriedCuts& cuts, std::int32_t v0,
                                                std::int32_t step, std::uint32_t stored) {
        if (warp() != 0 || !(lane() < kToldTogether && (stored >> lane() & 1))) return;
        announce(params.states.stored_starts + cuts.row(step / kToldTogether * kToldTogether + lane() + 1),
                 static_cast<std::uint32_t>(min(kRows, params.call.problem.dim_v - v0)));
    }

    static __device__ __forceinline__ float* transition(Shared& shared, int stage) {
        return reinterpret_cast<float*>(shared.rows) + stage * kTransitionElements;  // [k][n]
    }
    static __device__ __forceinline__ float* sums(Shared& shared, int part) {  // [v][n]
        return part < kParts / 2 ? reinterpret_cast<float*>(shared.rows) + 2 * kTransitionElements + part * kSums
                                 : reinterpret_cast<float*>(&shared.outputs) + (part - kParts / 2) * kSums;
    }
    static __device__ __forceinline__ float* states(Shared& shared) {  // [k][v]
        return reinterpret_cast<float*>(shared.factors);
    }

    // The warp's part of S^T M^T.
    static __device__ __forceinline__ void multiply(Shared& shared, const float* m) {
        float x[kRows][4] = {};
        const float* s = states(shared) + warp() * kEach * kRows;
        m += warp() * kEach * kK + 4 * lane();
#pragma unroll 4
        for (int k = 0; k < kEach; ++k) {
            const float4 at = *reinterpret_cast<const float4*>(m + k * kK);
#pragma unroll
            for (int v = 0; v < kRows; v += 4) {
                const float4 four = *reinterpret_cast<const float4*>(s + k * kRows + v);
                const float of[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    x[v + i][0] = fmaf(of[i], at.x, x[v + i][0]);
                    x[v + i][1] = fmaf(of[i], at.y, x[v + i][1]);
                    x[v + i][2] = fmaf(of[i], at.z, x[v + i][2]);
                    x[v + i][3] = fmaf(of[i], at.w, x[v + i][3]);
                }
            }
        }
        float* to = sums(shared, warp()) + 4 * lane();
#pragma unroll
        for (int v = 0; v < kRows; ++v) {
            *reinterpret_cast<float4*>(to + v * kK) = {x[v][0], x[v][1], x[v][2], x[v][3]};
        }
    }
};

}  // namespace flashqla::cuda::sm90
