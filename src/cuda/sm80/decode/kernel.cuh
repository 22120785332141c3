// One block computes one token of one (row, value head, strip of V columns): it reads its part of the state once and
// writes it once. With a = exp(g), u = S^T k, r = S^T q (norms and scale folded in),
//   d = beta (v - a u),   o = a r + (k . q) d,   S <- a S + k d^T
#pragma once

#include "cuda/device/gates.cuh"
#include "cuda/device/grid_order.cuh"
#include "cuda/device/memory.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/sm80/decode/params.hpp"
#include "cuda/sm80/decode/tile.cuh"

namespace flashqla::cuda::sm80 {

template <class Config>
struct DecodeShared {
    alignas(16) float k[Config::kK];
    alignas(16) float q[Config::kK];
    // kv: S^T k and S^T q over the keys of a warp.
    alignas(16) float reads[Config::kVFirst ? 1 : Config::kWarps][2][Config::kVFirst ? 4 : Config::kWidth];
};

// The rows of q and k as bits, four neighbours a lane; every warp has them all.
template <class Config>
struct KeyRows {
    static constexpr int kFours = (Config::kK + 127) / 128;
    std::uint32_t k[kFours][4], q[kFours][4];  // 16-bit types: two of each four are used

    static __device__ __forceinline__ int first(int lane, int i) { return 4 * lane + 128 * i; }

    // Issues the loads. NOTE: whatever waits for a number, such as a conversion, would hold up the loads behind it.
    __device__ __forceinline__ void load(const DecodeCall& call, std::int64_t k_at, std::int64_t q_at, int lane) {
#pragma unroll
        for (int i = 0; i < kFours; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) k[i][j] = q[i][j] = 0;
        if (call.problem.io == DType::f32) {
            load_as(static_cast<const uint4*>(call.k.data) + k_at / 4,
                    static_cast<const uint4*>(call.q.data) + q_at / 4, lane);
        } else {
            load_as(static_cast<const uint2*>(call.k.data) + k_at / 4,
                    static_cast<const uint2*>(call.q.data) + q_at / 4, lane);
        }
    }

    static __device__ __forceinline__ float4 floats(const std::uint32_t (&bits)[4], DType io) {
        if (io == DType::f32) {
            return make_float4(__uint_as_float(bits[0]), __uint_as_float(bits[1]), __uint_as_float(bits[2]),
                               __uint_as_float(bits[3]));
        }
        return make_float4(float_of_bits(bits[0] & 0xffffu, io), float_of_bits(bits[0] >> 16, io),
                           float_of_bits(bits[1] & 0xffffu, io), float_of_bits(bits[1] >> 16, io));
    }

private:
    template <class FourBits>
    __device__ __forceinline__ void load_as(const FourBits* k_row, const FourBits* q_row, int lane) {
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
            if (first(lane, i) >= Config::kK) continue;
            const FourBits from_k = k_row[first(lane, i) / 4], from_q = q_row[first(lane, i) / 4];
            k[i][0] = from_k.x, k[i][1] = from_k.y;
            q[i][0] = from_q.x, q[i][1] = from_q.y;
            if constexpr (sizeof(FourBits) == sizeof(uint4)) {
                k[i][2] = from_k.z, k[i][3] = from_k.w;
                q[i][2] = from_q.z, q[i][3] = from_q.w;
            }
        }
    }
};

__device__ __forceinline__ float dot(float4 a, float4 b) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w)));
}

// What the rows of k and q are multiplied by (scale is in q), and k . q with that.
struct KeyFactors {
    float k, q, kq;
};

// k and q into shared memory.
template <class Config>
__device__ __forceinline__ KeyFactors stage_keys(const Problem& p, const KeyRows<Config>& rows,
                                                 DecodeShared<Config>& shared, const DecodeLane<Config>& at) {
    float kk = 0.0f, qq = 0.0f, kq = 0.0f;
#pragma unroll
    for (int i = 0; i < KeyRows<Config>::kFours; ++i) {
        const float4 k = rows.floats(rows.k[i], p.io), q = rows.floats(rows.q[i], p.io);
        const int first = rows.first(at.lane, i);
        if (at.warp == 0 && first < Config::kK) {
            *reinterpret_cast<float4*>(shared.k + first) = k;
            *reinterpret_cast<float4*>(shared.q + first) = q;
        }
        kk += dot(k, k);
        qq += dot(q, q);
        kq += dot(k, q);
    }
    KeyFactors f{1.0f, p.scale, 0.0f};
    if (p.qk_l2norm) {
        f.k = 1.0f / sqrtf(warp_sum(kk) + p.l2norm_eps);
        f.q = p.scale / sqrtf(warp_sum(qq) + p.l2norm_eps);
    }
    f.kq = warp_sum(kq) * f.k * f.q;
    if constexpr (Config::kWarps > 1) {
        __syncthreads();
    } else {
        __syncwarp();
    }
    return f;
}

// A lane's keys of a row in shared memory.
template <class Config>
__device__ __forceinline__ void keys_of(const float* row, const DecodeLane<Config>& at, float (&x)[Config::kKeys]) {
#pragma unroll
    for (int i = 0; i < Config::kKeys; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(row + at.key(i));
        x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
}

// S^T k and S^T q of the columns that the lane finishes, over all keys.
template <class Config>
struct DecodeReads {
    float k[Config::kMine], q[Config::kMine];

    // u and r: over the lane's keys.
    __device__ __forceinline__ DecodeReads(float (&u)[Config::kColumns], float (&r)[Config::kColumns],
                                           DecodeShared<Config>& shared, const DecodeLane<Config>& at) {
        constexpr int kColumns = Config::kColumns, kLanesK = Config::kLanesK;
        if constexpr (Config::kVFirst) {
            k[0] = sum_rows<kColumns, kLanesK>(u, at.k);
            q[0] = sum_rows<kColumns, kLanesK>(r, at.k);
        } else {
            static_assert(kColumns >= kLanesK);
            constexpr int kLeft = kColumns / kLanesK;
            share_sums<kColumns, kLanesK, Config::kLanesV>(u, at.k);
            share_sums<kColumns, kLanesK, Config::kLanesV>(r, at.k);
#pragma unroll
            for (int i = 0; i < kLeft; ++i) {
                shared.reads[at.warp][0][at.column() + at.k * kLeft + i] = u[i];
                shared.reads[at.warp][1][at.column() + at.k * kLeft + i] = r[i];
            }
            __syncthreads();
#pragma unroll
            for (int c = 0; c < Config::kMine; ++c) {
                k[c] = q[c] = 0.0f;
#pragma unroll
                for (int w = 0; w < Config::kWarps; ++w) {
                    k[c] += shared.reads[w][0][at.mine() + c];
                    q[c] += shared.reads[w][1][at.mine() + c];
                }
            }
        }
    }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    decode_kernel(const __grid_constant__ DecodeCall call, const __grid_constant__ DecodeGrid grid) {
    using State = typename Config::State;
    using Tile = DecodeTile<Config>;
    constexpr int kColumns = Config::kColumns, kKeys = Config::kKeys, kMine = Config::kMine;
    __shared__ DecodeShared<Config> shared;
    const Problem& p = call.problem;
    const DecodeLane<Config> at;
    const std::uint32_t row = grid.strips.quotient(blockIdx.x);
    const int v0 = static_cast<int>(grid.strips.remainder(blockIdx.x, row)) * Config::kWidth;
    wait_for_earlier_grids();
    let_next_grid_start();
    const std::uint32_t n = grid.heads.quotient(row), head = grid.heads.remainder(row, n);

    // Loads go out first, those that depend on nothing before those that wait for a slot.
    const Slots slots = grid.plain_rows ? Slots{false, n, n} : clamped_slots(call, n);
    const std::uint32_t quotient = grid.keys.quotient(head);
    const std::uint32_t key_head = p.grouping == Grouping::interleaved ? quotient : grid.keys.remainder(head, quotient);
    KeyRows<Config> rows;
    rows.load(call, call.k.offset(n, 0, key_head), call.q.offset(n, 0, key_head), at.lane);
    const std::uint32_t g_bits = call.g ? load_bits(call.g.data, call.g.dtype, call.g.offset(n, 0, head)) : 0;
    const std::uint32_t beta_bits =
        call.beta ? load_bits(call.beta.data, call.beta.dtype, call.beta.offset(n, 0, head)) : 0;
    const std::int64_t v_at = call.v.offset(n, 0, head) + v0 + at.mine();
    const std::int64_t o_at = call.o.offset(n, 0, head) + v0 + at.mine();
    std::uint32_t v_bits[kMine];
#pragma unroll
    for (int c = 0; c < kMine; ++c) v_bits[c] = load_bits(call.v.data, p.io, v_at + c);
    if (slots.padding) {
#pragma unroll
        for (int c = 0; c < kMine; ++c)
            if (at.stores(c)) store_element(call.o.data, call.o.dtype, o_at + c, 0.0f);
        return;
    }
    const int first = Tile::first(at, v0, p.dim_v);
    Tile tile;
    if (slots.read >= 0) {
        tile.load(static_cast<const State*>(call.state.data) + call.state.offset(slots.read, head) + first, p.dim_v);
    } else {
        tile.zero();
    }

    const float decay = HeadGate(call, static_cast<std::int32_t>(head)).decay(call, g_bits);
    const float beta = beta_of(call, beta_bits);
    const KeyFactors f = stage_keys(p, rows, shared, at);
    float k[kKeys], q[kKeys];
    keys_of(shared.k, at, k);
    keys_of(shared.q, at, q);
    float u[kColumns] = {}, r[kColumns] = {};
#pragma unroll
    for (int i = 0; i < kKeys; ++i)
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            const float s = tile.get(c, i);
            u[c] = fmaf(s, k[i], u[c]);
            r[c] = fmaf(s, q[i], r[c]);
        }
    const DecodeReads<Config> reads(u, r, shared, at);
    float mine[kMine];
#pragma unroll
    for (int c = 0; c < kMine; ++c) {
        mine[c] = beta * fmaf(-decay * f.k, reads.k[c], float_of_bits(v_bits[c], p.io));
        const float o = fmaf(f.kq, mine[c], decay * f.q * reads.q[c]);
        if (at.stores(c)) store_element(call.o.data, call.o.dtype, o_at + c, o);
        mine[c] *= f.k;
    }
    if (slots.write < 0) return;

    // delta of the lane's columns, from the lanes that finished them.
    float delta[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
        const int from = Config::kVFirst ? at.v * Config::kLanesK + c : (at.column() + c) / kMine;
        delta[c] = __shfl_sync(kFullWarp, mine[c % kMine], from);
    }
    tile.forget(static_cast<std::uint32_t>(p.heads_v) >> 31);
    State* to = static_cast<State*>(call.state.data) + call.state.offset(slots.write, head) + first;
    tile.update(k, delta, decay, to, p.dim_v);
}

}  // namespace flashqla::cuda::sm80
