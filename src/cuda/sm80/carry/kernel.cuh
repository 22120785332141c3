// A block owns 8 or 16 columns of V of one (sequence, head), as rows of S^T, and walks over the cuts:
//
//   S'^T[v][n] = E^T[v][n] + sum_k S^T[v][k] M^T[k][n]
//
// or, for gradients, from the last cut to the first: D'^T[v][n] = D*^T[v][n] + sum_k D^T[v][k] M^T[n][k].
//
// A step cannot begin before the one before it has ended, so latency is what it takes; but M and E are known all along:
// before it computes, a step asks for its E and for the M of the next one. Threads read M as it lies, 16 bytes each and
// 128 bytes of a row at a time, in both directions; what differs is which of its indices is summed over, within a warp
// by shuffles.
#pragma once

#include "cuda/device/chunks.cuh"
#include "cuda/device/grid_order.cuh"
#include "cuda/device/memory.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/sm80/carry/params.hpp"

namespace flashqla::cuda::sm80 {

template <int kK_, int kRows_>
struct CarryConfig {
    static constexpr int kK = kK_;  // keys, the last ones unused when dim_k is smaller
    static constexpr int kRows = kRows_;
    // A warp takes 32 results n and a part of the sum, a tile of 32 x 32 elements of M at a time.
    static constexpr int kGroups = kK / 32, kMost = 16 / kGroups;
    static constexpr int kParts = kGroups < kMost ? kGroups : kMost, kTiles = kGroups / kParts;
    static constexpr int kThreads = 32 * kGroups * kParts;
    static constexpr int kRowsEach = kRows * kK / kThreads;  // of a column n, by a thread
};

template <class Config>
struct CarryShared {
    static constexpr int kWide = Config::kK + 4, kTall = Config::kRows + 4;  // rows in different banks
    union {
        alignas(16) float keys[Config::kK][kTall];     // S^T, turned: [k][v]
        alignas(16) float rows[Config::kRows][kWide];  // D^T [v][k]
    } state;
    alignas(16) float sums[Config::kParts][Config::kRows][kWide];
};

template <class Config, bool kBack>
class CarryWalk {
    static constexpr int kK = Config::kK, kRows = Config::kRows, kTiles = Config::kTiles;
    static constexpr int kRowsEach = Config::kRowsEach;
    static constexpr bool kOwnLast = kTiles > 1;  // no registers are left to ask for E earlier
    // Lane l has elements 4 (l % 8) .. + 3 of rows l / 8, 4 + l / 8, ... of a tile.
    struct Tile {
        float m[8][4];
    };

public:
    __device__ __forceinline__ CarryWalk(const CarryParams& params, CarryShared<Config>& shared, int head, int v0)
        : params_(params),
          shared_(shared),
          K_(params.in.problem.dim_k),
          V_(params.in.problem.dim_v),
          heads_(params.in.problem.heads_v),
          head_(head),
          v0_(v0) {}

    // `first` and `count`: the sequence's segments.
    __device__ __forceinline__ void run(std::int32_t first, std::int32_t count) {
        constexpr int kWay = kBack ? -1 : 1;
        std::int32_t segment = kBack ? first + count - 1 : first;
        Tile tile = {};
        for (std::int32_t step = 0; step + 1 < count; ++step, segment += kWay) {
            const bool chained = step > 0;  // the state that this step begins with is in shared memory
            const bool more = step + 2 < count;
            float own[kRowsEach];
            if (!kOwnLast || !chained) load_own(own, row(segment));
            if (chained) {
#pragma unroll 1
                for (int t = 0; t < kTiles; ++t) {
                    Tile next = {};
                    if (t + 1 < kTiles) {
                        load(next, row(segment), t + 1);
                    } else if (more) {
                        load(next, row(segment + kWay), 0);
                    }
                    multiply(tile, t);
                    tile = next;
                }
                if (kOwnLast) load_own(own, row(segment));
                __syncthreads();
                add_sums(own);
            } else if (more) {
                load(tile, row(segment + kWay), 0);
            }
            store(own, row(segment));
            __syncthreads();
        }
    }

private:
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
    static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x / 32); }
    static __device__ __forceinline__ int group() { return warp() % Config::kGroups; }
    static __device__ __forceinline__ int part() { return warp() / Config::kGroups; }
    // First of the 32 indices that are summed over in a tile of this warp.
    static __device__ __forceinline__ int first_summed(int t) { return 32 * (part() * kTiles + t); }
    // The results that a thread writes: rows v() .. of column n().
    static __device__ __forceinline__ int n() { return static_cast<int>(threadIdx.x) % kK; }
    static __device__ __forceinline__ int v() { return static_cast<int>(threadIdx.x) / kK * kRowsEach; }

    __device__ __forceinline__ std::int64_t row(std::int32_t segment) const {
        return std::int64_t{segment} * heads_ + head_;
    }

    __device__ __forceinline__ void load(Tile& to, std::int64_t row, int t) const {
        const int top = (kBack ? 32 * group() : first_summed(t)) + lane() / 8;
        const int left = (kBack ? first_summed(t) : 32 * group()) + lane() % 8 * 4;
        const float* from = params_.states.ends + only_here((row * (V_ + K_) + V_ + top) * K_ + left);
        if (K_ % 4 == 0) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
                if (top + 4 * i < K_ && left < K_) x = *reinterpret_cast<const float4*>(from + 4 * i * K_);
                to.m[i][0] = x.x, to.m[i][1] = x.y, to.m[i][2] = x.z, to.m[i][3] = x.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    to.m[i][j] = top + 4 * i < K_ && left + j < K_ ? from[4 * i * K_ + j] : 0.0f;
                }
        }
    }

    // To shared memory, where a lane adds to what it stored for the tile before.
    __device__ __forceinline__ void multiply(const Tile& tile, int t) const {
        // NOTE: rolled, or the registers of all turns are taken at once.
        constexpr int kAtOnce = kBack ? 2 : 4;
#pragma unroll 1
        for (int v = 0; v < kRows; v += kAtOnce) {
            float x[16] = {};  // [rows v][8 rows i of the tile], or [rows v][4 columns j]
            if constexpr (kBack) {
#pragma unroll
                for (int r = 0; r < kAtOnce; ++r) {
                    const float4 d =
                        *reinterpret_cast<const float4*>(&shared_.state.rows[v + r][first_summed(t) + lane() % 8 * 4]);
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        const float(&m)[4] = tile.m[i];
                        x[8 * r + i] = fmaf(d.w, m[3], fmaf(d.z, m[2], fmaf(d.y, m[1], d.x * m[0])));
                    }
                }
                share_sums<16, 8>(x, lane() % 8);
                float* to = &shared_.sums[part()][v + lane() % 8 / 4][32 * group() + lane() % 4 * 8 + lane() / 8];
#pragma unroll
                for (int e = 0; e < 2; ++e) to[4 * e] = t > 0 ? to[4 * e] + x[e] : x[e];
            } else {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const float4 s =
                        *reinterpret_cast<const float4*>(&shared_.state.keys[first_summed(t) + 4 * i + lane() / 8][v]);
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        x[j] = fmaf(s.x, tile.m[i][j], x[j]);
                        x[4 + j] = fmaf(s.y, tile.m[i][j], x[4 + j]);
                        x[8 + j] = fmaf(s.z, tile.m[i][j], x[8 + j]);
                        x[12 + j] = fmaf(s.w, tile.m[i][j], x[12 + j]);
                    }
                }
                share_sums<16, 4, 8>(x, lane() / 8);
                auto* to =
                    reinterpret_cast<float4*>(&shared_.sums[part()][v + lane() / 8][32 * group() + lane() % 8 * 4]);
                const float4 before = t > 0 ? *to : float4{0.0f, 0.0f, 0.0f, 0.0f};
                *to = {before.x + x[0], before.y + x[1], before.z + x[2], before.w + x[3]};
            }
        }
    }

    __device__ __forceinline__ void add_sums(float (&own)[kRowsEach]) const {
#pragma unroll
        for (int i = 0; i < kRowsEach; ++i)
#pragma unroll
            for (int other = 0; other < Config::kParts; ++other) own[i] += shared_.sums[other][v() + i][n()];
    }

    __device__ __forceinline__ bool inside(int i) const { return n() < K_ && v0_ + v() + i < V_; }

    // What the segment itself leaves.
    __device__ __forceinline__ void load_own(float (&own)[kRowsEach], std::int64_t row) const {
        const float* states = kBack ? params_.adjoints.starts : params_.states.ends;
        const float* from = states + only_here((row * (kBack ? V_ : V_ + K_) + v0_ + v()) * K_ + n());
#pragma unroll
        for (int i = 0; i < kRowsEach; ++i) {
            own[i] = inside(i) ? from[i * K_] : 0.0f;
        }
    }

    // To the next segment on the way, and for the next step.
    __device__ __forceinline__ void store(const float (&own)[kRowsEach], std::int64_t row) const {
        float* states = kBack ? params_.adjoints.ends : params_.states.starts;
        float* to = states + only_here(((kBack ? row - heads_ : row + heads_) * V_ + v0_ + v()) * K_ + n());
#pragma unroll
        for (int i = 0; i < kRowsEach; ++i) {
            if (inside(i)) to[i * K_] = own[i];
        }
        if constexpr (kBack) {
#pragma unroll
            for (int i = 0; i < kRowsEach; ++i) shared_.state.rows[v() + i][n()] = own[i];
        } else {
            constexpr int kAtOnce = kRowsEach < 4 ? kRowsEach : 4;
            struct alignas(4 * kAtOnce) Rows {
                float x[kAtOnce];
            };
#pragma unroll
            for (int i = 0; i < kRowsEach; i += kAtOnce) {
                Rows rows;
#pragma unroll
                for (int e = 0; e < kAtOnce; ++e) rows.x[e] = own[i + e];
                *reinterpret_cast<Rows*>(&shared_.state.keys[n()][v() + i]) = rows;
            }
        }
    }

    const CarryParams& params_;
    CarryShared<Config>& shared_;
    const int K_, V_;
    const int heads_, head_, v0_;
};

// NOTE: no more blocks than there is room for: mostly few sequences are cut, or none, and then it is blocks without
// work that take the time.
template <class Config, bool kBack>
__global__ void __launch_bounds__(Config::kThreads) carry_kernel(const __grid_constant__ CarryParams params) {
    wait_for_earlier_grids();
    const Problem& p = params.in.problem;
    if (!is_needed(params.table)) return;
    const auto tiles = static_cast<std::uint32_t>(pieces(p.dim_v, Config::kRows));
    const auto heads = static_cast<std::uint32_t>(p.heads_v);
    for (std::uint32_t i = blockIdx.x; i < params.items; i += params.blocks) {
        const std::uint32_t item = i / tiles;
        const SegmentRange segments = segments_of(params.in, params.table, item / heads);
        if (segments.count < 2) continue;
        CarryWalk<Config, kBack>(params, shared_block<CarryShared<Config>>(), static_cast<int>(item % heads),
                                 static_cast<int>(i % tiles) * Config::kRows)
            .run(segments.first, segments.count);
    }
}

}  // namespace flashqla::cuda::sm80
