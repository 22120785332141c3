// The warpgroup that makes a chunk's triangles. Warp w has tokens 16 w .. 16 w + 15 as rows of
//
//   K K^T    symmetric: L's blocks below the diagonal are taken from above it, so that warps 3 - w of them have as much
//            to do as w of them have with P
//   Q K^T    P
//
// While Q K^T and P are made others make of L what solves (solver.cuh).
#pragma once

#include "cuda/device/fast_exp.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/sm90/forward/config.cuh"

namespace flashqla::cuda::sm90 {

template <class Config>
class ForwardTriangleMaker : ForwardRole<Config> {
    using Role = ForwardRole<Config>;
    using Op = typename Config::Op;
    using Element = typename Op::Element;
    using Role::shared;
    static constexpr int kStages = Config::kStages, kTurns = Config::kTurns;

public:
    __device__ __forceinline__ ForwardTriangleMaker(const Role& role, int warp) : Role(role), warp_(warp) {}

    template <bool kCut>
    __device__ __forceinline__ void run() {
        RingPlace<kStages> place;
        ForwardItems<Config> items(shared);
        Turn<kTurns> at;
        if constexpr (kCut) run_items<false>(items, place, at);
        run_items<true>(items, place, at);
    }

private:
    // NOTE: two loops, since a branch around products would make them wait. kOutputs: else ends, which take no Q.
    template <bool kOutputs>
    __device__ __forceinline__ void run_items(ForwardItems<Config>& items, RingPlace<kStages>& place,
                                              Turn<kTurns>& at) {
        std::int32_t left = items.next_chunks(!kOutputs);
        if (left == 0) return;
        wait_for_rows(place);
        ask_keys(place.stage);
#pragma unroll 1
        for (;; ++at.n) {
            const std::uint32_t turn = at.stage(), round = at.round();
            const Turn<Config::kFactors> of_factors{at.n};
            const ForwardFactors& factors = shared.factors[of_factors.stage()];
            shared.factors_full[of_factors.stage()].wait(of_factors.round());
            shared.lower_empty[turn].wait(round ^ 1);
            wgmma_wait<0>();
            settle(products_);
            store_lower(factors, shared.triangles[turn]);
            arrive(shared.lower_full[turn]);
            if constexpr (kOutputs) ask_queries(place.stage);
            shared.triangles_empty[turn].wait(round ^ 1);
            if constexpr (kOutputs) {
                wgmma_wait<0>();
                settle(products_);
                store_attention(factors, shared.attention[turn]);
                fence_for_wgmma();
            }
            arrive(shared.triangles_full[turn]);
            place.next();
            if (--left == 0) left = items.next_chunks(!kOutputs);
            if (left > 0) wait_for_rows(place);
            ask_keys(place.stage);  // NOTE: of nothing in the end, for the same reason
            if (left == 0) break;
        }
        ++at.n;
        wgmma_wait<0>();
    }

    __device__ __forceinline__ int warp() const { return warp_; }
    // NOTE: known only where it is asked for, or places that depend on it are kept in registers all along, and others
    // go to memory and back.
    static __device__ __forceinline__ int lane() { return only_here(static_cast<int>(threadIdx.x)) & 31; }
    static __device__ __forceinline__ void arrive(Barrier& barrier) {
        __syncwarp();
        if (Role::lane() == 0) barrier.arrive();
    }

    __device__ __forceinline__ void wait_for_rows(const RingPlace<kStages>& place) {
        shared.rows_full[place.stage].wait(place.round);
        fence_for_wgmma();
    }

    // ------------------------------------------------------------------------------------------------- products

    template <class Tile>
    __device__ __forceinline__ void multiply_rows(const Tile& left, const Tile& right) {
        const auto a = left.along_k(), b = right.along_k();
        wgmma_fence();
        wgmma<false, Rows::along_k, Rows::along_k>(products_, a(0), b(0), Element{});
#pragma unroll
        for (int k = 16; k < Config::kK; k += 16) {
            wgmma<true, Rows::along_k, Rows::along_k>(products_, a(k), b(k), Element{});
        }
        wgmma_commit();
    }
    __device__ __forceinline__ void ask_keys(int stage) { multiply_rows(shared.rows[stage].k, shared.rows[stage].k); }
    __device__ __forceinline__ void ask_queries(int stage) {
        multiply_rows(shared.rows[stage].q, shared.rows[stage].k);
    }

    // -------------------------------------------------------------------------------------------------- stores

    // Accumulators of 16 columns, times the factors of rows and columns.
    template <class To>
    static __device__ __forceinline__ Fragment<To> scaled(const float (&left)[4], const float (&right)[4], float first,
                                                          float second, const float4& columns) {
        Fragment<To> f;
        f.set(0, Pair<To>::of(first * columns.x * left[0], first * columns.y * left[1]));
        f.set(1, Pair<To>::of(second * columns.x * left[2], second * columns.y * left[3]));
        f.set(2, Pair<To>::of(first * columns.z * right[0], first * columns.w * right[1]));
        f.set(3, Pair<To>::of(second * columns.z * right[2], second * columns.w * right[3]));
        return f;
    }

    // Of pairs of tokens in the diagonal block, times norm_k of the second. Where the second is the later one this is
    // anything.
    __device__ __forceinline__ void diagonal_decays(const ForwardFactors& f, int i, int own) {
        const float4 high = f.high.of_block(warp(), own), low = f.low.of_block(warp(), own),
                     norm = f.norm_k.of_block(warp(), own);
        const float high0 = f.high.at(i), high1 = f.high.at(i + 2), low0 = f.low.at(i), low1 = f.low.at(i + 2);
        decays_[0] = fast_exp((high0 - high.x) + (low0 - low.x)) * norm.x;
        decays_[1] = fast_exp((high0 - high.y) + (low0 - low.y)) * norm.y;
        decays_[2] = fast_exp((high1 - high.x) + (low1 - low.x)) * norm.x;
        decays_[3] = fast_exp((high1 - high.y) + (low1 - low.y)) * norm.y;
        decays_[4] = fast_exp((high1 - high.z) + (low1 - low.z)) * norm.z;
        decays_[5] = fast_exp((high1 - high.w) + (low1 - low.w)) * norm.w;
    }

    // The products of the warp's diagonal block. NOTE: selected, so that all warps run the same instructions: the
    // caches that these come from are what the roles of the kernel have least of.
    struct Block {
        float left[4], right[4];
    };
    __device__ __forceinline__ Block diagonal() const {
        Block x;
        const int w = warp();
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            x.left[e] = w < 2    ? (w == 0 ? products_[0][e] : products_[2][e])
                        : w == 2 ? products_[4][e]
                                 : products_[6][e];
            x.right[e] = w < 2    ? (w == 0 ? products_[1][e] : products_[3][e])
                         : w == 2 ? products_[5][e]
                                  : products_[7][e];
        }
        return x;
    }

    // -L.
    __device__ __forceinline__ void store_lower(const ForwardFactors& f, ForwardTriangles& to) {
        const int lane = this->lane(), own = TokenVector::own();
        const int i = TokenVector::place(16 * warp() + lane / 4);  // and that of the eighth token after it is 2 more
#pragma unroll
        for (int later = 1; later < 4; ++later) {
            if (later <= warp()) continue;
            const TokenVector& decay = f.to_block[later - 1];
            const Fragment<F16Operand> x =
                scaled<F16Operand>(products_[2 * later], products_[2 * later + 1], -decay.at(i), -decay.at(i + 2),
                                   f.row_k.of_block(later, own));
            stmatrix_transposed(to.lower.place(later, warp(), lane), x.x[0][0], x.x[0][1], x.x[0][2], x.x[0][3]);
        }
        diagonal_decays(f, i, own);
        const Block x = diagonal();
        const float first = -f.norm_k.at(i), second = -f.norm_k.at(i + 2);
        stmatrix(to.lower.place(warp(), warp(), lane),
                 pack(first * decays_[0] * x.left[0], first * decays_[1] * x.left[1], __half{}), 0,
                 pack(second * decays_[2] * x.left[2], second * decays_[3] * x.left[3], __half{}),
                 pack(second * decays_[4] * x.right[2], second * decays_[5] * x.right[3], __half{}));
    }

    __device__ __forceinline__ void store_attention(const ForwardFactors& f, SwizzledTile<Op, 64, 64>& to) {
        const int lane = this->lane(), row = lane / 4, column = 2 * (lane % 4), own = TokenVector::own();
        const int i = TokenVector::place(16 * warp() + row);
        if (warp() > 0) {
            const float first = f.row_q.at(i), second = f.row_q.at(i + 2);
#pragma unroll
            for (int block = 0; block < 3; ++block) {
                if (block >= warp()) continue;
                to.put(lane, 16 * warp(), 16 * block,
                       scaled<Op>(products_[2 * block], products_[2 * block + 1], first, second,
                                  f.to_block[warp() - 1].of_block(block, own)));
            }
        }
        // Selected, not multiplied: a decay of what is above the diagonal may be infinite.
        const Block block = diagonal();
        const float first = f.norm_q.at(i), second = f.norm_q.at(i + 2);
        const bool at = row >= column, after = row >= column + 1;
        Fragment<Op> x;
        x.set(0, Pair<Op>::of(at ? first * decays_[0] * block.left[0] : 0.0f,
                              after ? first * decays_[1] * block.left[1] : 0.0f));
        x.set(1, Pair<Op>::of(second * decays_[2] * block.left[2], second * decays_[3] * block.left[3]));
        x.set(2, Pair<Op>::of(0.0f, 0.0f));
        x.set(3, Pair<Op>::of(at ? second * decays_[4] * block.right[2] : 0.0f,
                              after ? second * decays_[5] * block.right[3] : 0.0f));
        to.put(lane, 16 * warp(), 16 * warp(), x);
    }

    const int warp_;        // of the group, known to be uniform
    float products_[8][4];  // K K^T or Q K^T
    float decays_[6];
};

}  // namespace flashqla::cuda::sm90
