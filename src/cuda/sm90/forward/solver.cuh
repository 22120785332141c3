// The two warps that make of a chunk's L what the walk solves with (ForwardTriangles). Warp w has blocks 2w and 2w + 1
// of the diagonal, what couples these two, and what the lower half takes from block w:
//
//   A_j        = beta (I + L_j beta)^-1          a lane has one row of one block, in fp16
//   T_b        = N A_a,  N = A_b (-L_ba)         a = 2w, b = 2w + 1
//   M_2w       = A_2 (-L_2w)
//   M_3w       = A_3 (-L_3w - L_32 M_2w)
#pragma once

#include "cuda/sm90/forward/config.cuh"

namespace flashqla::cuda::sm90 {

template <class Config>
class ForwardSolver : ForwardRole<Config> {
    using Role = ForwardRole<Config>;
    using Role::shared;
    using Lower = decltype(ForwardTriangles::lower);
    using Solve = decltype(ForwardTriangles::solve);
    using Block = Fragment<F16Operand>;
    static constexpr int kPairs = 8;  // of a row of a block

public:
    // warp: 0 or 1, which has blocks 2 warp and 2 warp + 1.
    __device__ __forceinline__ ForwardSolver(const Role& role, int warp)
        : Role(role), warp_(warp), block_(2 * warp + Role::lane() / 16), row_(Role::lane() % 16) {}

    __device__ __forceinline__ void run() {
        ForwardItems<Config> items(shared);
        Turn<Config::kTurns> at;
        std::int32_t left = items.next_chunks();
#pragma unroll 1
        for (; left > 0; ++at.n) {
            const std::uint32_t turn = at.stage();
            const Turn<Config::kFactors> of_factors{at.n};
            shared.factors_full[of_factors.stage()].wait(of_factors.round());
            shared.lower_full[turn].wait(at.round());
            ForwardTriangles& triangles = shared.triangles[turn];
            __half2 x[kPairs];
            invert(x, triangles.lower, shared.factors[of_factors.stage()].beta + kPairs * block_);
            shared.triangles_empty[turn].wait(at.round() ^ 1);
            store(x, triangles.solve);
            sync_threads<Config::kSolversMeeting, 64>();
            couple(triangles.lower, triangles.solve);
            fence_for_wgmma();
            __syncwarp();
            if (Role::lane() == 0) {
                shared.lower_empty[turn].arrive();
                shared.triangles_full[turn].arrive();
            }
            if (--left == 0) left = items.next_chunks();
        }
    }

private:
    struct alignas(16) Four {
        __half2 x[4];
    };

    // Row row_ of A = X beta; `lower` is -L. X (I + beta L) = I gives X's elements from the diagonal down to the first.
    __device__ __forceinline__ void invert(__half2 (&x)[kPairs], const Lower& lower, const __half2* beta) const {
        const __half2 zero = __float2half2_rn(0.0f);
        __half2 b[kPairs];
#pragma unroll
        for (int j = 0; j < kPairs; j += 4) *reinterpret_cast<Four*>(b + j) = *reinterpret_cast<const Four*>(beta + j);
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            x[j] = __floats2half2_rn(row_ == 2 * j ? 1.0f : 0.0f, row_ == 2 * j + 1 ? 1.0f : 0.0f);
        }
        const __half* rows = lower.x + lower.at(16 * block_, 16 * block_);
#pragma unroll
        for (int i = 15; i > 0; --i) {
            const int mine = i / 2;
            const __half2 scaled = __hmul2(x[mine], b[mine]);
            const __half2 factor = i % 2 == 0 ? __low2half2(scaled) : __high2half2(scaled);
            Four l[2];
            l[0] = *reinterpret_cast<const Four*>(rows + lower.at(i, 0));
            if (i > 8) l[1] = *reinterpret_cast<const Four*>(rows + lower.at(i, 8));
#pragma unroll
            for (int j = kPairs - 1; j >= 0; --j) {
                if (2 * j >= i) continue;
                __half2 pair = l[j / 4].x[j % 4];
                if (2 * j + 1 == i) pair = __halves2half2(__low2half(pair), __low2half(zero));  // the diagonal
                x[j] = __hfma2(factor, pair, x[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < kPairs; ++j) x[j] = __hmul2(x[j], b[j]);
    }

    __device__ __forceinline__ void store(const __half2 (&x)[kPairs], Solve& to) const {
        char* bytes = reinterpret_cast<char*>(to.x);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Four four;
#pragma unroll
            for (int j = 0; j < 4; ++j) four.x[j] = x[4 * half + j];
            *reinterpret_cast<Four*>(bytes + to.offset(16 * block_ + row_, 16 * block_ + 8 * half)) = four;
        }
    }

    // What lies below the diagonal blocks of `to`, which are there; `lower` is -L.
    __device__ __forceinline__ void couple(const Lower& lower, Solve& to) const {
        const int lane = Role::lane(), a = 32 * warp_, b = a + 16, w = 16 * warp_;
        const Block below = product(lower.a_transposed(2, warp_), to.b_transposed(32, 32));  // M_2w^T
        const Block n = product(to.a(b, b), lower.b(2 * warp_ + 1, 2 * warp_));
        to.put_transposed(lane, 32, w, below);
        float left[4], right[4];
        unpack(left, right, lower.a_transposed(3, warp_));
        multiply(left, right, below, lower.b_transposed(3, 2));
        to.put(lane, b, a, product(n, to.b(a, a)));
        to.put_transposed(lane, 48, w, product(Block::of(left, right), to.b_transposed(48, 48)));
    }

    static __device__ __forceinline__ Block product(const Block& a, const Block& b) {
        float left[4] = {}, right[4] = {};
        multiply(left, right, a, b);
        return Block::of(left, right);
    }
    // A fragment as accumulators.
    static __device__ __forceinline__ void unpack(float (&left)[4], float (&right)[4], const Block& f) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 first = f.pair(half).value(), second = f.pair(2 + half).value();
            left[2 * half] = first.x, left[2 * half + 1] = first.y;
            right[2 * half] = second.x, right[2 * half + 1] = second.y;
        }
    }

    const int warp_;  // known to be uniform
    int block_, row_;
};

}  // namespace flashqla::cuda::sm90
