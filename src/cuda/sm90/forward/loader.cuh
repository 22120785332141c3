// The warp that loads q, k and v of the chunks ahead.
#pragma once

#include "cuda/sm90/forward/config.cuh"

namespace flashqla::cuda::sm90 {

template <class Config, ChunkMode kMode>
class ForwardLoader : ForwardRole<Config, kMode> {
    using Role = ForwardRole<Config, kMode>;
    using Op = typename Config::Op;
    using Rows = ForwardRows<Config>;
    using Role::call;
    using Role::kOutputs;
    using Role::lane;
    using Role::params;
    using Role::shared;
    static constexpr int kChunk = Config::kChunk;

public:
    __device__ __forceinline__ ForwardLoader(const Role& role) : Role(role), at_(role.shared.place) {}

    __device__ __forceinline__ void run(int tokens) {
        key_head_ = call.key_head(at_.head);
        token_ = at_.span.begin + at_.segment.first_token;
        // A transition's values are zeros.
        if (at_.transition) {
#pragma unroll 1
            for (int i = 0; i < Config::kStages; ++i) clear_rows(shared.rows[i].values, 0);
            fence_for_wgmma();
        }
        RingPlace<Config::kStages> place;
#pragma unroll 1
        for (std::int32_t c = this->chunks(); c > 0; --c, tokens -= kChunk, token_ += kChunk) {
            shared.rows_empty[place.stage].wait(place.round ^ 1);
            Rows& to = shared.rows[place.stage];
            Barrier& full = shared.rows_full[place.stage];
            if (!params.mapped) {
                fill(to, tokens);
                fence_for_wgmma();
                __syncwarp();
                if (lane() == 0) full.arrive();
            } else if (tokens >= kChunk) {
                if (lane() == 0) copy(to, full);
            } else {
                if (lane() == 0) copy(to, shared.tail_full);
                __syncwarp();
                shared.tail_full.wait(0);
                clear_tail(to, tokens);
                fence_for_wgmma();
                __syncwarp();
                if (lane() == 0) full.arrive();
            }
            place.next();
        }
    }

private:
    // By one lane.
    __device__ __forceinline__ void copy(Rows& to, Barrier& full) const {
        constexpr std::uint32_t kEach = 2 * kBoxBytes;
        static_assert(Config::kK == 128 && Config::kColumns == 128);
        full.arrive_expecting(kEach * (1 + (kOutputs ? 1 : 0) + (at_.transition ? 0 : 1)));
        copy_tile(to.k, params.k_map, full, 0, key_head_);
        if constexpr (kOutputs) copy_tile(to.q, params.q_map, full, 0, key_head_);
        if (!at_.transition) copy_tile(to.values, params.v_map, full, at_.v0, at_.head);
    }
    template <class Tile>
    __device__ __forceinline__ void copy_tile(Tile& to, const TensorMap& map, Barrier& full, int column,
                                              int head) const {
#pragma unroll
        for (int panel = 0; panel < 2; ++panel) {
            copy_box(to.x + panel * (Tile::kPanelBytes / 2), map, full, column + 64 * panel, head,
                     static_cast<int>(token_), static_cast<int>(at_.span.batch));
        }
    }

    __device__ __forceinline__ void clear_tail(Rows& to, int tokens) const {
        clear_rows(to.k, tokens);
        if constexpr (kOutputs) clear_rows(to.q, tokens);
        clear_rows(to.values, tokens);
    }
    // Rows first.. of a tile.
    template <class Tile>
    static __device__ __forceinline__ void clear_rows(Tile& tile, int first) {
        static_assert(Tile::kColumns == 128);
#pragma unroll 1
        for (int i = 16 * first + lane(); i < 16 * Tile::kRows; i += 32) {
            *reinterpret_cast<uint4*>(reinterpret_cast<char*>(tile.x) + Tile::offset(i / 16, i % 16 * 8)) = uint4{};
        }
    }

    // What no tensor map describes, one element after another.
    __device__ __forceinline__ void fill(Rows& to, int tokens) const {
        fill_tile(to.k, call.k, key_head_, 0, tokens, call.problem.dim_k);
        if constexpr (kOutputs) fill_tile(to.q, call.q, key_head_, 0, tokens, call.problem.dim_k);
        if (!at_.transition) fill_tile(to.values, call.v, at_.head, at_.v0, tokens, call.problem.dim_v - at_.v0);
    }
    // NOTE: not called but written out: a call would leave all roles of the kernel with as many registers.
    template <class Tile>
    __device__ __forceinline__ void fill_tile(Tile& tile, const TokenRef& from, int head, int skip, int rows,
                                              int columns) const {
        using Input = typename Op::Input;
        const auto* data = static_cast<const Input*>(from.data) + from.offset(at_.span.batch, token_, head) + skip;
        constexpr int kPairs = Tile::kColumns / 2;
#pragma unroll 1
        for (int at = lane(); at < Tile::kRows * kPairs; at += 32) {
            const int row = at / kPairs, column = at % kPairs * 2;
            const Input* pair = data + row * from.token + column;
            const float first = row < rows && column < columns ? to_float(pair[0]) : 0.0f;
            const float second = row < rows && column + 1 < columns ? to_float(pair[1]) : 0.0f;
            tile.set(row, column, Pair<Op>::of(first, second));
        }
    }

    const StatePlace& at_;
    std::int64_t token_ = 0;  // of the next chunk to load
    int key_head_ = 0;
};

}  // namespace flashqla::cuda::sm90
