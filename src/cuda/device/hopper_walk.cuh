// What Hopper's walks have in common, forwards and back: a block has 64 or 128 columns of V of one value head, a
// warpgroup for each 64 of them that computes, with 64 rows of the state or of its gradient in its registers, and one
// warpgroup that loads chunks ahead.
#pragma once

#include "cuda/chunks.hpp"
#include "cuda/device/pipeline.cuh"
#include "cuda/device/ring.cuh"
#include "cuda/device/swizzled_tile.cuh"

namespace flashqla::cuda {

template <class Op_, int kK_, int kColumns_>
struct HopperWalkConfig {
    using Op = Op_;
    static constexpr int kK = kK_;  // keys, the last ones zero when dim_k is smaller
    static constexpr int kChunk = 64, kBlocks = kChunk / 16;
    static constexpr int kColumns = kColumns_;  // of V that a block holds
    static constexpr int kGroups = kColumns / 64, kConsumers = 128 * kGroups, kLoaders = 128;
    static constexpr int kThreads = kConsumers + kLoaders;
    static constexpr int kStages = 3;
    // NOTE: with two computing warpgroups every thread would have 168 registers; with one it has enough as it is.
    static constexpr bool kShiftRegisters = kGroups > 1;
    static constexpr int kConsumerRegisters = 224, kLoaderRegisters = 56;
    using Record = PreparedChunk<typename Op::Element, 1, kChunk>;
};

// f.template operator()<Config>() with the one for so many keys and columns of a block, for a launch.
template <class Op, class F>
Status with_walk_config(std::int32_t dim_k, std::int32_t columns, F&& f) noexcept {
    if (dim_k <= 64) {
        return columns == 128 ? f.template operator()<HopperWalkConfig<Op, 64, 128>>()
                              : f.template operator()<HopperWalkConfig<Op, 64, 64>>();
    }
    return columns == 128 ? f.template operator()<HopperWalkConfig<Op, 128, 128>>()
                          : f.template operator()<HopperWalkConfig<Op, 128, 64>>();
}

// Everything a chunk needs. kAlong: how its products take the triangles.
template <class Config, Rows kAlong>
struct HopperWalkStage {
    using Op = typename Config::Op;
    using Element = typename Op::Element;
    static constexpr int kChunk = Config::kChunk;

    SwizzledTile<Op, kChunk, Config::kK> k, q;
    SwizzledTile<Op, kChunk, Config::kColumns> values;  // of v or d_o; then of o or d_v, on their way out
    TrianglePanels<Element, 2, kAlong> inverse;
    TrianglePanels<Element, 1, kAlong> attention;
    alignas(16) float beta[kChunk], read[kChunk], query[kChunk], keep[kChunk], total[4];  // as in PreparedChunk

    // By the lanes of one warp: asks for a record, in the background as a whole. kAttention: with P.
    template <bool kAttention>
    __device__ __forceinline__ void load(const typename Config::Record& record, Barrier& full) {
        constexpr std::uint32_t kFactors = sizeof(float) * (4 * kChunk + 4);
        if (threadIdx.x % 32 == 0) {
            full.arrive_expecting(kFactors + inverse.kBytes + (kAttention ? attention.kBytes : 0));
            copy_bulk(beta, record.beta, kFactors, full);
        }
        __syncwarp();
        if constexpr (kAttention) attention.copy(record.attention, full);
        inverse.copy(record.inverse, full);
    }
};

// to = X T with both in two parts; the product of the second ones would be below fp32's rounding. Asked for, not
// committed.
template <Rows kAlong, class Op>
__device__ __forceinline__ void wgmma_in_two_parts(
    float (&to)[8][4], const Fragment<TwoParts<Op>> (&x)[4],
    typename TrianglePanels<typename Op::Element, 2, kAlong>::Operand t) {
    constexpr typename Op::Element kType{};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (j == 0) {
            wgmma<false, kAlong>(to, x[j].x[0], t(0, j), kType);
        } else {
            wgmma<true, kAlong>(to, x[j].x[0], t(0, j), kType);
        }
        wgmma<true, kAlong>(to, x[j].x[0], t(1, j), kType);
        wgmma<true, kAlong>(to, x[j].x[1], t(0, j), kType);
    }
}

template <class Config, Rows kAlong>
struct HopperWalkShared {
    using Stage = HopperWalkStage<Config, kAlong>;
    Stage stages[Config::kStages];
    Barrier full[Config::kStages], empty[Config::kStages];

    // By all threads of the block, before anybody loads or computes.
    template <bool kAttention>
    __device__ __forceinline__ void open() {
        if (threadIdx.x == 0) {
#pragma unroll
            for (int i = 0; i < Config::kStages; ++i) {
                full[i].init(Config::kLoaders + 1);  // and for the record
                empty[i].init(Config::kConsumers / 32);
            }
            fence_barrier_init();
        }
#pragma unroll
        for (int i = 0; i < Config::kStages; ++i) {
            stages[i].inverse.template clear<Config::kThreads>();
            if constexpr (kAttention) stages[i].attention.template clear<Config::kThreads>();
        }
        fence_for_wgmma();
        __syncthreads();
    }

    // Calls load() in the loading warpgroup, compute() in the others, each with the registers it may have.
    template <class Load, class Compute>
    static __device__ __forceinline__ void share_out(Load&& load, Compute&& compute) {
        if (threadIdx.x >= Config::kConsumers) {
            if constexpr (Config::kShiftRegisters) give_registers<Config::kLoaderRegisters>();
            load();
        } else {
            if constexpr (Config::kShiftRegisters) take_registers<Config::kConsumerRegisters>();
            compute();
        }
    }
};

}  // namespace flashqla::cuda
