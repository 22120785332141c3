// The warp that finds the items of the block, and loads q, k and v of the chunks ahead.
#pragma once

#include "cuda/sm90/forward/config.cuh"
#include "cuda/sm90/forward/walk.cuh"

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
    __device__ __forceinline__ ForwardLoader(const Role& role) : Role(role) {}

    __device__ __forceinline__ void run() {
        const std::uint32_t each = call.problem.heads_v * params.tiles;
        const std::int64_t segments = segments_end(call, params.table, params.segment_blocks / each);
        const std::uint32_t items = static_cast<std::uint32_t>(segments) * each;
        // What waits for the carry between segments comes last.
        windows_ = params.states.windows && choice_of(params.table).windows;
        bool waits = kOutputs && params.states.windows;
        const std::uint32_t rounds = waits && segments > call.count ? 2 : 1;
#pragma unroll 1
        for (std::uint32_t i = blockIdx.x; i < rounds * items; i = next_number(i)) {
            const bool last = i >= items;
            if (last && waits) {
                wait_for_earlier_grids();
                waits = false;
            }
            if (!find(last ? i - items : i, last)) continue;
            load(shared.items[turn_.stage()]);
            ++turn_.n;
        }
        if (waits) wait_for_earlier_grids();
        shared.item_empty[turn_.stage()].wait(turn_.round() ^ 1);
        if (lane() == 0) {
            shared.items[turn_.stage()].place.segment.n = -1;
            shared.item_full[turn_.stage()].arrive();
        }
    }

private:
    // Whoever is first takes the next one where lengths are not known beforehand.
    __device__ __forceinline__ std::uint32_t next_number(std::uint32_t i) const {
        if (!params.table.taken) return i + gridDim.x;
        std::uint32_t taken = 0;
        if (lane() == 0) taken = atomicAdd(params.table.taken, 1u);
        return gridDim.x + __shfl_sync(kFullWarp, taken, 0);
    }

    // Hands the i-th item to the others, if there is anything to do for it. `carried`: of outputs with windows, those
    // whose start state is carried, and no others.
    __device__ __forceinline__ bool find(std::uint32_t i, bool carried) const {
        const auto heads = static_cast<std::uint32_t>(call.problem.heads_v);
        const std::uint32_t tile = i % params.tiles, row = i / params.tiles;
        const std::int64_t number = row / heads;
        const Segment segment = segment_of(call, params.table, number);
        if (segment.n < 0) return false;
        using Walk = ForwardWalk<Config, kMode>;
        StatePlace place =
            Walk::place_of(params, segment, number, static_cast<std::int32_t>(row % heads), static_cast<int>(tile));
        bool walks = Walk::walks(place);
        if (!walks && !kOutputs) return false;
        if (kOutputs && params.states.windows && !windows_) {
            if ((segment.index > 0) != carried) return false;
        } else if (windows_) {
            const std::int32_t* window = params.states.windows + row;
            place.warm = segment.index > 0 ? max(*window, 0) : 0;
            const bool whole_past = segment.index > 0 && place.warm == 0;
            if constexpr (kOutputs) {
                if (whole_past != carried) return false;
            } else {
                // Nobody asks for the end, or for the transition of a segment whose past is forgotten.
                if (place.transition && !whole_past) return false;
                walks = window[heads] == kWholePast;
                if (!walks && !Walk::start_is_kept(call, place)) return false;
            }
        }
        shared.item_empty[turn_.stage()].wait(turn_.round() ^ 1);
        if (lane() == 0) {
            ForwardItem& item = shared.items[turn_.stage()];
            item.place = place;
            item.chunks = walks ? segment.chunks + place.warm : 0;
            item.tokens = Walk::tokens_of(place, params.table.chunk) + place.warm * kChunk;
            item.columns = call.problem.dim_v - place.v0;
            shared.item_full[turn_.stage()].arrive();
        }
        __syncwarp();
        return true;
    }

    __device__ __forceinline__ void load(const ForwardItem& item) {
        const StatePlace& at = item.place;
        key_head_ = call.key_head(at.head);
        token_ = item.first_token();
        int tokens = item.tokens;
        const std::int32_t chunks = item.chunks;
#pragma unroll 1
        for (std::int32_t c = 0; c < chunks; ++c, tokens -= kChunk, token_ += kChunk) {
            RingPlace<Config::kStages>& place = place_;
            shared.rows_empty[place.stage].wait(place.round ^ 1);
            Rows& to = shared.rows[place.stage];
            Barrier& full = shared.rows_full[place.stage];
            // A transition's values are zeros.
            if (at.transition && c < Config::kStages) {
                clear_rows(to.values, 0);
                __syncwarp();
            }
            if (!params.mapped) {
                fill(to, at, tokens);
                fence_for_wgmma();
                __syncwarp();
                if (lane() == 0) full.arrive();
            } else if (tokens >= kChunk) {
                if (lane() == 0) copy(to, full, at);
            } else {
                if (lane() == 0) copy(to, shared.tail_full, at);
                __syncwarp();
                shared.tail_full.wait(tail_round_);
                tail_round_ ^= 1;
                clear_tail(to, tokens);
                fence_for_wgmma();
                __syncwarp();
                if (lane() == 0) full.arrive();
            }
            place.next();
        }
    }

    // By one lane.
    __device__ __forceinline__ void copy(Rows& to, Barrier& full, const StatePlace& at) const {
        constexpr std::uint32_t kEach = 2 * kBoxBytes;
        static_assert(Config::kK == 128 && Config::kColumns == 128);
        full.arrive_expecting(kEach * (1 + (kOutputs ? 1 : 0) + (at.transition ? 0 : 1)));
        const auto batch = static_cast<int>(at.span.batch);
        copy_tile(to.k, params.k_map, full, 0, key_head_, batch);
        if constexpr (kOutputs) copy_tile(to.q, params.q_map, full, 0, key_head_, batch);
        if (!at.transition) copy_tile(to.values, params.v_map, full, at.v0, at.head, batch);
    }
    template <class Tile>
    __device__ __forceinline__ void copy_tile(Tile& to, const TensorMap& map, Barrier& full, int column, int head,
                                              int batch) const {
#pragma unroll
        for (int panel = 0; panel < 2; ++panel) {
            copy_box(to.x + panel * (Tile::kPanelBytes / 2), map, full, column + 64 * panel, head,
                     static_cast<int>(token_), batch);
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
    __device__ __forceinline__ void fill(Rows& to, const StatePlace& at, int tokens) const {
        const std::int64_t batch = at.span.batch;
        fill_tile(to.k, call.k, batch, key_head_, 0, tokens, call.problem.dim_k);
        if constexpr (kOutputs) fill_tile(to.q, call.q, batch, key_head_, 0, tokens, call.problem.dim_k);
        if (!at.transition) fill_tile(to.values, call.v, batch, at.head, at.v0, tokens, call.problem.dim_v - at.v0);
    }
    // NOTE: not called but written out: a call would leave all roles of the kernel with as many registers.
    template <class Tile>
    __device__ __forceinline__ void fill_tile(Tile& tile, const TokenRef& from, std::int64_t batch, int head, int skip,
                                              int rows, int columns) const {
        using Input = typename Op::Input;
        const auto* data = static_cast<const Input*>(from.data) + from.offset(batch, token_, head) + skip;
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

    Turn<Config::kItems> turn_;         // of items
    RingPlace<Config::kStages> place_;  // of rows
    std::uint32_t tail_round_ = 0;
    bool windows_ = false;
    std::int64_t token_ = 0;  // of the next chunk to load
    int key_head_ = 0;
};

}  // namespace flashqla::cuda::sm90
