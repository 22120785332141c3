// The states at the cuts of a sequence, one after the other: the group that walks has 8 columns of V of one value head,
// and for every cut
//
//   S' = E + M S        [K,8], M [K,K]
//
// with the end E and the transition M of the segment before it. A step cannot begin before the one before it has ended,
// so its latency is what counts: M and E come to shared memory in the background, a step ahead, by the loader, and each
// warp makes 16 keys of S' on the matrix units. States, E and M are fp32; as operands they are two parts of 11 bits
// each, and three products of parts are added up in fp32, which leaves 2^-21 of each product.
//
// NOTE: lies where the rows of chunks and outputs are else; the loader brings no rows until it is done.
#pragma once

#include "cuda/device/arrivals.cuh"
#include "cuda/device/chunks.cuh"
#include "cuda/device/operand.cuh"
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

// M in memory, as the operands of the carry. It needs M [n][k] as A, 16 n of a warp by 8 k; a lane has four elements of
// each such block, 16 bytes. Which key k a place stands for is the same for S as B:
//
//   block j, place i of 8: k = 16 (j / 2) + 4 (j % 2) + i % 4 + 8 (i / 4)
//
// so that what a lane makes of S are neighbours in its place as B, and what it has of S^T when that becomes M are four
// neighbours in its place as A.
struct TransitionBlocks {
    static constexpr int kEach = 128 / 8;  // of 16 n

    // The lane's part of a block, in floats.
    static __device__ __forceinline__ int at(int of_rows, int block, int lane) {
        return 4 * ((of_rows * kEach + block) * 32 + lane);
    }
    // M^T, whose rows k are the rows of S^T of all who walk.
    static __device__ __forceinline__ void store(float* to, const StateRows<128>& rows) {
        const int thread = only_here(static_cast<int>(threadIdx.x));
        const int lane = thread % 32, row = lane / 4, column = lane % 4 * 2;
        float* own = to + at(0, thread / 32 * 2 + row / 4, column * 4 + row % 4);
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float(&left)[4] = rows.s[2 * n], (&right)[4] = rows.s[2 * n + 1];
                *reinterpret_cast<float4*>(own + at(n, 0, 4 * e)) = {left[e], right[e], left[2 + e], right[2 + e]};
            }
    }
};

// Tells who waits for start states of a value head, columns v0.. of V, that they are stored. By all lanes of a warp.
class CarriedNews {
public:
    __device__ __forceinline__ CarriedNews(const ForwardParams& params, const CarriedCuts& cuts, std::int32_t v0)
        : counts_(params.states.stored_starts),
          cuts_(cuts),
          columns_(static_cast<std::uint32_t>(min(kCarryColumns, params.call.problem.dim_v - v0))) {}

    // The start state behind the cut of a step is stored; none of a negative one. Steps ascend.
    __device__ __forceinline__ void add(std::int32_t step) {
        if (step < 0) return;
        if (step - first_ >= 32) tell();
        if (stored_ == 0) first_ = step;
        stored_ |= 1u << (step - first_);
        if (__popc(stored_) == kTogether) tell();
    }
    // NOTE: some at a time, because the fence before it takes as long as a step.
    __device__ __forceinline__ void tell() {
        const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
        if (stored_ >> lane & 1) announce(counts_ + cuts_.row(first_ + lane + 1), columns_);
        __syncwarp();
        stored_ = 0;
    }

private:
    static constexpr int kTogether = 4;

    std::uint32_t* counts_;
    const CarriedCuts& cuts_;
    const std::uint32_t columns_;
    std::int32_t first_ = 0;
    std::uint32_t stored_ = 0;  // steps from the first on, those that nobody has been told of
};

template <class Config>
class ForwardCarry {
    using Shared = ForwardShared<Config>;
    static constexpr int kK = Config::kK, kRows = kCarryColumns, kWarps = Config::kWalkers / 32;
    static_assert(kK == 128 && kRows == 8 && kWarps == kK / 16);

    struct Stage {
        float transition[kTransitionElements];  // TransitionBlocks
        float end[kRows * kK];                  // [v][n], rows of dim_k
    };
    // S as B operands, a lane's of two blocks of keys side by side.
    struct States {
        float4 x[kWarps][32];

        // NOTE: lanes that store and lanes that load meet in few banks so.
        static __device__ __forceinline__ int place(int v, int i) { return 4 * (v ^ (v / 2 & 1)) + i; }
    };
    static_assert(sizeof(Shared::rows) >= 2 * sizeof(Stage) && sizeof(Shared::outputs) >= 2 * sizeof(States));

public:
    // What the loader does for it, all lanes together: brings ends and transitions, and tells what is stored.
    static __device__ __forceinline__ void load(const ForwardParams& params, Shared& shared, const CarriedCuts& cuts,
                                                std::int32_t v0, Turn<2>& turn) {
        const Problem& p = params.call.problem;
        // NOTE: up to a multiple of 16 bytes, as far as the memory of ends goes.
        const auto end_bytes = static_cast<std::uint32_t>((4 * min(kRows, p.dim_v - v0) * p.dim_k + 15) / 16 * 16);
        CarriedNews news(params, cuts, v0);
        std::int32_t steps[2] = {-1, -1};  // in the stages
        cuts.each([&](std::int64_t row, bool chained, std::int32_t step) {
            wait_for_count(params.states.stored_ends + row,
                           static_cast<std::uint32_t>(p.dim_v + (chained ? p.dim_k : 0)));
            const int number = static_cast<int>(turn.stage());
            shared.carry_empty[number].wait(turn.round() ^ 1);
            if (threadIdx.x % 32 == 0) {
                constexpr std::uint32_t kBytes = sizeof(Stage::transition);
                Barrier& full = shared.carry_full[number];
                Stage& to = stage(shared, number);
                const float* ends = params.states.ends + row * end_elements(p);
                fence_for_copies();
                full.arrive_expecting(end_bytes + (chained ? kBytes : 0));
                copy_bulk(to.end, ends + std::int64_t(v0) * p.dim_k, end_bytes, full);
                if (chained) copy_bulk(to.transition, ends + end_state_elements(p), kBytes, full);
            }
            __syncwarp();
            news.add(steps[0]);
            steps[0] = steps[1], steps[1] = step;
            ++turn.n;
        });
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (steps[i] < 0) continue;
            const Turn<2> last{turn.n - 2 + i};
            shared.carry_empty[last.stage()].wait(last.round());
            news.add(steps[i]);
        }
        news.tell();
    }

    // By all who walk. `turn`: as the loader's.
    static __device__ __forceinline__ void run(const ForwardParams& params, Shared& shared, const CarriedCuts& cuts,
                                               std::int32_t v0, Turn<2>& turn) {
        const Problem& p = params.call.problem;
        // NOTE: what follows from the thread's number is made here; made before the roles part it would be loaded from
        // local memory in every step.
        const int thread = only_here(static_cast<int>(threadIdx.x)), warp = thread / 32, lane = thread % 32;
        // Of this lane: keys n and n + 8 of columns v and v + 1.
        const int n = 16 * warp + lane / 4, v = lane % 4 * 2;
        const auto inside = [&](int e) { return n + e / 2 * 8 < p.dim_k && v0 + v + e % 2 < p.dim_v; };
        const auto at = [&](int e) { return (v + e % 2) * p.dim_k + n + e / 2 * 8; };
        cuts.each([&](std::int64_t row, bool chained, std::int32_t) {
            const int number = static_cast<int>(turn.stage());
            const Stage& from = stage(shared, number);
            shared.carry_full[number].wait(turn.round());
            float state[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) state[e] = inside(e) ? from.end[at(e)] : 0.0f;
            if (chained) add_product(state, from.transition, states(shared, number ^ 1), warp, lane);
            auto* places = reinterpret_cast<float2*>(states(shared, number).x[warp]) + lane / 16;
            places[2 * States::place(v, lane / 4 % 4)] = {state[0], state[2]};
            places[2 * States::place(v + 1, lane / 4 % 4)] = {state[1], state[3]};
            float* to = params.states.starts + (row + p.heads_v) * p.dim_v * p.dim_k + std::int64_t(v0) * p.dim_k;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (inside(e)) to[at(e)] = state[e];
            }
            __syncwarp();
            if (lane == 0) shared.carry_empty[number].arrive();
            meet();
            ++turn.n;
        });
    }

private:
    static __device__ __forceinline__ void meet() { sync_threads<Config::kMeeting, Config::kWalkers>(); }

    static __device__ __forceinline__ Stage& stage(Shared& shared, int number) {
        return reinterpret_cast<Stage*>(shared.rows)[number];
    }
    static __device__ __forceinline__ States& states(Shared& shared, int number) {
        return reinterpret_cast<States*>(&shared.outputs)[number];
    }

    // The warp's 16 keys of M S.
    static __device__ __forceinline__ void add_product(float (&state)[4], const float* transition, const States& before,
                                                       int warp, int lane) {
        float sums[2][4] = {}, small[2][4] = {};
        const float* own = transition + TransitionBlocks::at(warp, 0, lane);
        const int place = States::place(lane / 4, lane % 4);
#pragma unroll
        for (int k = 0; k < kWarps; ++k) {
            const float4 two = before.x[k][place];
            const float of_s[2][2] = {{two.x, two.y}, {two.z, two.w}};
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float4 m = *reinterpret_cast<const float4*>(own + TransitionBlocks::at(0, 2 * k + j, 0));
                const Tf32Parts a[4] = {Tf32Parts::of(m.x), Tf32Parts::of(m.y), Tf32Parts::of(m.z), Tf32Parts::of(m.w)};
                const Tf32Parts b[2] = {Tf32Parts::of(of_s[j][0]), Tf32Parts::of(of_s[j][1])};
                const std::uint32_t high[4] = {a[0].high, a[1].high, a[2].high, a[3].high};
                const std::uint32_t low[4] = {a[0].low, a[1].low, a[2].low, a[3].low};
                mma_16x8x8(small[j], low, b[0].high, b[1].high);
                mma_16x8x8(sums[j], high, b[0].high, b[1].high);
                mma_16x8x8(small[j], high, b[0].low, b[1].low);
            }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) state[e] += small[0][e] + small[1][e] + sums[0][e] + sums[1][e];
    }
};

}  // namespace flashqla::cuda::sm90
