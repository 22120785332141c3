// The two warps that invert the diagonal blocks of a chunk's triangle: a lane has one row of one block's inverse, in
// fp16. With X = (I + beta L)^-1, X (I + beta L) = I gives the row's elements from the diagonal down to the first.
#pragma once

#include "cuda/sm90/forward/config.cuh"

namespace flashqla::cuda::sm90 {

template <class Config>
class ForwardDiagonal : ForwardRole<Config> {
    using Role = ForwardRole<Config>;
    using Role::shared;
    static constexpr int kPairs = 8;  // of a row of a block

public:
    // warp: 0 or 1, which has blocks 2 warp and 2 warp + 1.
    __device__ __forceinline__ ForwardDiagonal(const Role& role, int warp)
        : Role(role), block_(2 * warp + Role::lane() / 16), row_(Role::lane() % 16) {}

    __device__ __forceinline__ void run() {
        RingPlace<Config::kStages> place;
        ForwardItems<Config> items(shared);
        Turn<Config::kTurns> at;
        std::int32_t left = items.next_chunks();
#pragma unroll 1
        for (; left > 0; ++at.n) {
            const std::uint32_t turn = at.stage();
            shared.factors_full[place.stage].wait(place.round);
            shared.lower_full[turn].wait(at.round());
            __half2 x[kPairs];
            solve(x, shared.triangles[turn].diagonal, shared.factors[place.stage].beta + kPairs * block_);
            shared.triangles_empty[turn].wait(at.round() ^ 1);
            store(x, shared.triangles[turn].solve);
            fence_for_wgmma();
            __syncwarp();
            if (Role::lane() == 0) shared.diagonal_full[turn].arrive();
            place.next();
            if (--left == 0) left = items.next_chunks();
        }
    }

private:
    struct alignas(16) Four {
        __half2 x[4];
    };

    // Row row_ of X beta; `lower` is -L.
    __device__ __forceinline__ void solve(__half2 (&x)[kPairs], const __half* lower, const __half2* beta) const {
        const __half2 zero = __float2half2_rn(0.0f);
        __half2 b[kPairs];
#pragma unroll
        for (int j = 0; j < kPairs; j += 4) *reinterpret_cast<Four*>(b + j) = *reinterpret_cast<const Four*>(beta + j);
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            x[j] = __floats2half2_rn(row_ == 2 * j ? 1.0f : 0.0f, row_ == 2 * j + 1 ? 1.0f : 0.0f);
        }
        const __half* rows = lower + 16 * block_ * ForwardTriangles::kDiagonalRow;
#pragma unroll
        for (int i = 15; i > 0; --i) {
            const int mine = i / 2;
            const __half2 scaled = __hmul2(x[mine], b[mine]);
            const __half2 factor = i % 2 == 0 ? __low2half2(scaled) : __high2half2(scaled);
            const __half* row = rows + i * ForwardTriangles::kDiagonalRow;
            Four l[2];
            l[0] = *reinterpret_cast<const Four*>(row);
            if (i > 8) l[1] = *reinterpret_cast<const Four*>(row + 8);
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

    __device__ __forceinline__ void store(const __half2 (&x)[kPairs], SwizzledTile<F16Operand, 64, 64>& to) const {
        char* bytes = reinterpret_cast<char*>(to.x);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Four four;
#pragma unroll
            for (int j = 0; j < 4; ++j) four.x[j] = x[4 * half + j];
            *reinterpret_cast<Four*>(bytes + to.offset(16 * block_ + row_, 16 * block_ + 8 * half)) = four;
        }
    }

    int block_, row_;
};

}  // namespace flashqla::cuda::sm90
