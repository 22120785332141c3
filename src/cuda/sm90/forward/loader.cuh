// The warp that takes items for the block, and loads q, k and v of the chunks ahead.
#pragma once

#include "cuda/device/arrivals.cuh"
#include "cuda/sm90/forward/config.cuh"
#include "cuda/sm90/forward/walk.cuh"

namespace flashqla::cuda::sm90 {

// Items of a segment, if they are outputs.
__device__ __forceinline__ std::uint32_t item_tiles(const ForwardParams& params) {
    return static_cast<std::uint32_t>(params.call.problem.heads_v) * params.tiles;
}

// Where a segment lies. Without a table sequences have the same length, and are not cut.
__device__ __forceinline__ SegmentRecord record_of(const ForwardParams& params, std::int64_t number) {
    if (params.table.records) return params.table.records[number];
    SegmentRecord record;
    record.length = static_cast<std::int32_t>(params.call.problem.tokens);
    record.n = static_cast<std::int32_t>(number);
    record.chunks = (record.length + params.table.chunk - 1) / params.table.chunk;
    return record;
}

template <class Config, bool kCut>
class ForwardLoader : ForwardRole<Config> {
    using Role = ForwardRole<Config>;
    using Op = typename Config::Op;
    using Rows = ForwardRows<Config>;
    using Ends = ForwardWalk<Config, ChunkMode::ends, kCut>;
    using Outputs = ForwardWalk<Config, ChunkMode::outputs, kCut>;
    using Role::call;
    using Role::lane;
    using Role::params;
    using Role::shared;
    static constexpr int kChunk = Config::kChunk;

public:
    __device__ __forceinline__ ForwardLoader(const Role& role) : Role(role) {}

    __device__ __forceinline__ void run(const SegmentRecord& first) {
        const SegmentChoice choice = choice_of(params.table);
        const std::uint32_t segments = params.table.choice ? static_cast<std::uint32_t>(choice.segments)
                                                           : params.segment_blocks / item_tiles(params);
        const std::uint32_t outputs = segments * item_tiles(params);
        if constexpr (kCut) {
            windows_ = choice.windows && params.states.windows;
            run(segments, outputs, static_cast<std::uint32_t>(choice.cut));
        } else {
            std::uint32_t i = blockIdx.x;
            if (i < outputs) {
                if (find_output(i, first, false)) load();
#pragma unroll 1
                for (i = next_of(i); i < outputs; i = next_of(i)) {
                    if (find_output(i, record_of(params, i / item_tiles(params)), false)) load();
                }
            }
        }
        announce_end(ForwardWork::no_more);
    }

private:
    // How many items blocks have taken before.
    __device__ __forceinline__ std::uint32_t taken() const {
        std::uint32_t before = 0;
        if (lane() == 0) before = atomicAdd(params.table.taken + kItemsTaken, 1u);
        return __shfl_sync(kFullWarp, before, 0);
    }
    // Where nothing waits, the first item of a block has its number. Where lengths are known beforehand they all are
    // shared out evenly.
    __device__ __forceinline__ std::uint32_t next_of(std::uint32_t i) const {
        return gridDim.x + (params.table.taken ? taken() : i);
    }

    // NOTE: numbers ascend for each block, and all blocks together take them in order, so that what an item waits for,
    // which has a lower number, is done or being done. Outputs that wait for a carry come last.
    __device__ __forceinline__ void run(std::uint32_t segments, std::uint32_t outputs, std::uint32_t cut) {
        const auto heads = static_cast<std::uint32_t>(call.problem.heads_v);
        const std::uint32_t ends = segments * heads * end_tiles(), carries = cut * heads * params.carry_tiles;
        outputs_ = false;
#pragma unroll 1
        for (std::uint32_t number = taken();; number = taken()) {
            std::uint32_t i = number;
            if (i < ends) {
                if (find_end(i)) load();
                continue;
            }
            if (!outputs_) announce_end(ForwardWork::no_more_ends);
            outputs_ = true;
            i -= ends;
            if (i < carries) {
                if (find_carry(i)) load_carry();
                continue;
            }
            i -= carries;
            if (i >= 2 * outputs) break;
            const bool carried = i >= outputs;
            if (carried) i -= outputs;
            if (find_output(i, record_of(params, i / item_tiles(params)), carried)) load();
        }
    }

    __device__ __forceinline__ std::uint32_t end_tiles() const {
        return params.tiles + static_cast<std::uint32_t>(pieces(call.problem.dim_k, Config::kColumns));
    }

    // Each of these hands the i-th item of a kind to the others, if there is anything to do for it.
    __device__ __forceinline__ bool find_end(std::uint32_t i) {
        const std::uint32_t row = i / end_tiles();
        StatePlace place = find_place<Ends>(record_of(params, row / heads()), row, i % end_tiles());
        bool walks = Ends::walks(place);
        if (!walks) return false;
        if (windows_) {
            const std::int32_t* window = params.states.windows + row;
            const bool whole_past = take_window(place, window);
            // Nobody asks for the end, or for the transition of a segment whose past is forgotten.
            if (place.transition && !whole_past) return false;
            walks = wait_for_value(window + call.problem.heads_v) == kWholePast;
            if (!walks && !start_is_kept(call, place)) return false;
        }
        hand_over(place, walks);
        return true;
    }
    // `carried`: those whose start state is carried, and no others.
    __device__ __forceinline__ bool find_output(std::uint32_t i, const SegmentRecord& record, bool carried) {
        const std::uint32_t row = i / params.tiles;
        StatePlace place = find_place<Outputs>(record, row, i % params.tiles);
        if constexpr (kCut) {
            const bool whole_past =
                windows_ ? take_window(place, params.states.windows + row) : place.segment.index > 0;
            if (whole_past != carried) return false;
        }
        hand_over(place, Outputs::walks(place));
        return true;
    }
    __device__ __forceinline__ bool find_carry(std::uint32_t i) {
        const std::uint32_t row = i / params.carry_tiles;
        StatePlace place{};
        place.segment.n = params.table.cut[row / heads()];
        // NOTE: nobody finds the ends of a padding row.
        if (clamped_slots(call, place.segment.n).padding) return false;
        place.head = static_cast<std::int32_t>(row % heads());
        place.v0 = static_cast<std::int32_t>(i % params.carry_tiles) * kCarryColumns;
        const SegmentRange segments = segments_of(call, params.table, place.segment.n);
        place.number = segments.first;
        ForwardItem& item = free_item();
        if (lane() == 0) {
            item.place = place;
            item.work = ForwardWork::carry;
            item.chunks = 0;
            item.segments = segments.count;
        }
        __syncwarp();
        if (!CarriedCuts(params, item, windows_).any()) return false;
        if (lane() == 0) shared.item_full[turn_.stage()].arrive();
        return true;
    }
    // NOTE: takes the place of the rows. It may take so long that what this block would take next is better left to
    // others until it is done.
    __device__ __forceinline__ void load_carry() {
        RingPlace<Config::kStages> place = place_;
#pragma unroll 1
        for (int i = 0; i < Config::kStages; ++i, place.next()) shared.rows_empty[place.stage].wait(place.round ^ 1);
        const ForwardItem& item = shared.items[turn_.stage()];
        ForwardCarry<Config>::load(params, shared, CarriedCuts(params, item, windows_), item.place.v0, carry_turn_);
        shared.item_empty[turn_.stage()].wait(turn_.round());
        ++turn_.n;
    }

    __device__ __forceinline__ std::uint32_t heads() const { return static_cast<std::uint32_t>(call.problem.heads_v); }
    // Of a (segment, value head) and one of its tiles.
    template <class Walk>
    __device__ __forceinline__ StatePlace find_place(const SegmentRecord& record, std::uint32_t row,
                                                     std::uint32_t tile) const {
        StatePlace place;
        place.segment.n = record.n;
        place.segment.first_token = record.first_token;
        place.segment.index = record.index;
        place.segment.chunks = record.chunks;
        place.segment.last = record.is_last != 0;
        place.span = {call.cu_seqlens ? 0 : record.n, record.begin, record.length};
        place.slots = clamped_slots(call, record.n);
        place.number = row / heads();
        place.head = static_cast<std::int32_t>(row % heads());
        place.transition = Walk::is_transition(params, static_cast<int>(tile));
        place.v0 = Walk::first_column(params, static_cast<int>(tile));
        return place;
    }
    // Whether the start state depends on the whole past.
    static __device__ __forceinline__ bool take_window(StatePlace& place, const std::int32_t* window) {
        place.warm = place.segment.index > 0 ? max(wait_for_value(window), 0) : 0;
        return place.segment.index > 0 && place.warm == 0;
    }

    // The place of the next item, once all are done with what was there.
    __device__ __forceinline__ ForwardItem& free_item() const {
        shared.item_empty[turn_.stage()].wait(turn_.round() ^ 1);
        return shared.items[turn_.stage()];
    }
    __device__ __forceinline__ void hand_over(const StatePlace& place, bool walks) {
        ForwardItem& item = free_item();
        if (lane() == 0) {
            item.place = place;
            item.work = ForwardWork::state;
            item.chunks = walks ? place.segment.chunks + place.warm : 0;
            item.tokens = Outputs::tokens_of(place, params.table.chunk) + place.warm * kChunk;
            item.columns = call.problem.dim_v - place.v0;
            item.token = static_cast<int>(place.span.begin + place.segment.first_token) - place.warm * kChunk;
            item.batch = static_cast<int>(place.span.batch);
            shared.item_full[turn_.stage()].arrive();
        }
        __syncwarp();
    }
    __device__ __forceinline__ void announce_end(ForwardWork what) {
        ForwardItem& item = free_item();
        if (lane() == 0) {
            item.work = what;
            item.chunks = 0;
            shared.item_full[turn_.stage()].arrive();
        }
        ++turn_.n;
    }

    // The rows of the item that was handed over. Q and the values come as soon as their place is free, K a little
    // later.
    __device__ __forceinline__ void load() {
        const ForwardItem& item = shared.items[turn_.stage()];
        ++turn_.n;
        const StatePlace& at = item.place;
        const int key_head = call.key_head(at.head);
        token_ = item.token;
        // NOTE: uniform, or an instruction of the copy engine becomes a loop over the numbers that lanes may have.
        const int chunks = uniform(item.chunks);
        int tokens = uniform(item.tokens);
        const bool transition = uniform(at.transition ? 1 : 0) != 0;
        const Boxes keys{0, uniform(key_head), uniform(item.batch)},
            values{uniform(at.v0), uniform(at.head), keys.batch};
#pragma unroll 1
        for (int c = 0; c < chunks; ++c, tokens -= kChunk, token_ += kChunk) {
            RingPlace<Config::kStages>& place = place_;
            const int stage = uniform(place.stage), token = uniform(token_);
            shared.values_empty[stage].wait(place.round ^ 1);
            Rows& to = shared.rows[stage];
            Barrier& full = shared.rows_full[stage];
            // A transition's values are zeros.
            if (transition && c < Config::kStages) {
                clear_rows(to.values, 0);
                __syncwarp();
            }
            const bool whole = tokens >= kChunk;
            Barrier& copied = shared.rows_full[uniform(whole ? stage : Config::kStages)];
            if (params.mapped && is_elected()) {
                constexpr std::uint32_t kEach = 2 * kBoxBytes;
                copied.arrive_expecting(kEach * (1 + (outputs_ ? 1 : 0) + (transition ? 0 : 1)));
                if (outputs_) copy_tile(to.q, params.q_map, copied, keys, token);
                if (!transition) copy_tile(to.values, params.v_map, copied, values, token);
            }
            shared.rows_empty[stage].wait(place.round ^ 1);
            if (params.mapped && is_elected()) copy_tile(to.k, params.k_map, copied, keys, token);
            if (!params.mapped || !whole) {
                if (params.mapped) {
                    __syncwarp();
                    copied.wait(tail_round_);
                    tail_round_ ^= 1;
                    clear_tail(to, tokens);
                } else {
                    fill(to, at, key_head, tokens);
                }
                fence_for_wgmma();
                __syncwarp();
                if (lane() == 0) full.arrive();
            }
            place.next();
        }
    }
    static __device__ __forceinline__ int uniform(std::int64_t x) {
        return static_cast<int>(cuda::uniform(static_cast<std::uint32_t>(x)));
    }

    // Of one item.
    struct Boxes {
        int column, head, batch;
    };
    // By one lane.
    template <class Tile>
    static __device__ __forceinline__ void copy_tile(Tile& to, const TensorMap& map, Barrier& full, const Boxes& at,
                                                     int token) {
        static_assert(Tile::kColumns == 128);
#pragma unroll
        for (int panel = 0; panel < 2; ++panel) {
            copy_box(to.x + panel * (Tile::kPanelBytes / 2), map, full, at.column + 64 * panel, at.head, token,
                     at.batch);
        }
    }

    __device__ __forceinline__ void clear_tail(Rows& to, int tokens) const {
        clear_rows(to.k, tokens);
        if (outputs_) clear_rows(to.q, tokens);
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
    __device__ __forceinline__ void fill(Rows& to, const StatePlace& at, int key_head, int tokens) const {
        const std::int64_t batch = at.span.batch;
        fill_tile(to.k, call.k, batch, key_head, 0, tokens, call.problem.dim_k);
        if (outputs_) fill_tile(to.q, call.q, batch, key_head, 0, tokens, call.problem.dim_k);
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
    Turn<2> carry_turn_;
    bool windows_ = false, outputs_ = true;
    std::int64_t token_ = 0;  // of the next chunk to load
};

}  // namespace flashqla::cuda::sm90
