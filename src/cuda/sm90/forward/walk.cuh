// A warpgroup that takes 64 columns of V through the chunks, as 64 rows of S^T in its registers. Every product has A in
// registers and B in shared memory:
//
//   U^T = S^T K^T, O^T = S^T Q^T           [64,C]
//   R^T = V^T - read U^T                   fp16
//   X^T = R^T (...)^T                      by halves of 32 tokens (ForwardTriangles), the first in fp16 for the second
//   O^T = query O^T + X^T P^T
//   S^T = total S^T + (keep X)^T K
//
// The state and the outputs are in units of a power of two, each warp's own, in which R lies in fp16's range.
#pragma once

#include "cuda/device/arrivals.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/swizzled_output.cuh"
#include "cuda/device/tail.cuh"
#include "cuda/sm90/forward/carry.cuh"
#include "cuda/sm90/forward/config.cuh"

namespace flashqla::cuda::sm90 {

// kCut: some sequence of the call is cut.
template <class Config, ChunkMode kMode, bool kCut>
class ForwardWalk : public StateWalk<Config::kK, Config::kColumns, kMode, true, true> {
    using Base = StateWalk<Config::kK, Config::kColumns, kMode, true, true>;
    using Op = typename Config::Op;
    using Element = typename Op::Element;
    using Half = Fragment<F16Operand>;
    using Values = decltype(ForwardRows<Config>::values);
    static constexpr int kChunk = Config::kChunk, kBlocks = Config::kBlocks, kK = Config::kK;
    static constexpr bool kOutputs = Base::kOutputs;
    using Base::at_;
    using Base::call_;
    using Base::inverse_unit_;
    using Base::p_;
    using Base::params_;
    using Base::state_;
    using Base::unit_;

public:
    using Base::first_column;
    using Base::is_transition;
    using Base::tokens_of;
    using Base::walks;

    // Everything of its kind that the group has to do in its block; carries are with the outputs.
    static __device__ __forceinline__ void run_all(const ForwardParams& params, ForwardShared<Config>& shared) {
        for (;;) {
            take_item(shared);
            // NOTE: or the compiler takes everything behind it for divergent, and descriptors of products from
            // registers that it does not have.
            const auto work = static_cast<ForwardWork>(uniform(static_cast<std::uint32_t>(shared.walk.item.work)));
            if (work == (kOutputs ? ForwardWork::no_more : ForwardWork::no_more_ends)) break;
            if constexpr (kOutputs && kCut) {
                if (work == ForwardWork::carry) {
                    carry(params, shared);
                    continue;
                }
            }
            ForwardWalk(params, shared).run();
        }
        if constexpr (kOutputs) wait_until_boxes_are_read();
        if (kOutputs && params.zero_blocks > 0) {
            const Problem& p = params.call.problem;
            zero_tail(params.call, params.call.o, p.heads_v, p.dim_v, blockIdx.x, gridDim.x, Config::kWalkers / 32);
        }
    }

private:
    // The next item, once both groups are done with the one before.
    static __device__ __forceinline__ void take_item(ForwardShared<Config>& shared) {
        constexpr int kWords = sizeof(ForwardItem) / 4;
        static_assert(kWords <= 128 && sizeof(ForwardItem) % 4 == 0);
        const Turn<Config::kItems> turn{shared.walk.number};
        shared.item_full[turn.stage()].wait(turn.round());
        sync_threads<Config::kMeeting, Config::kWalkers>();
        if (threadIdx.x < kWords) {
            reinterpret_cast<std::uint32_t*>(&shared.walk.item)[threadIdx.x] =
                reinterpret_cast<const std::uint32_t*>(&shared.items[turn.stage()])[threadIdx.x];
        } else if (threadIdx.x == 128) {
            shared.walk.number = turn.n + 1;
            shared.walk.first_chunk = shared.kept[0].chunk;
        }
        sync_threads<Config::kMeeting, Config::kWalkers>();
        if (lane() == 0 && !(kCut && shared.walk.item.work == ForwardWork::carry))
            shared.item_empty[turn.stage()].arrive();
    }

    static __device__ __forceinline__ void carry(const ForwardParams& params, ForwardShared<Config>& shared) {
        const ForwardItem& item = shared.walk.item;
        Turn<2> turn{shared.walk.carried};
        ForwardCarry<Config>::run(params, shared, CarriedCuts(params, item, choice_of(params.table).windows),
                                  item.place.v0, turn);
        fence_for_wgmma();
        sync_threads<Config::kMeeting, Config::kWalkers>();
        if (threadIdx.x == 0) shared.walk.carried = turn.n;
        const Turn<Config::kItems> taken{shared.walk.number - 1};
        if (lane() == 0) shared.item_empty[taken.stage()].arrive();
    }

    __device__ __forceinline__ ForwardWalk(const ForwardParams& params, ForwardShared<Config>& shared)
        : Base(params, shared.walk.item.place), shared_(shared) {}

    __device__ __forceinline__ void run() {
        if (kOutputs && at_.slots.padding) return Base::run_padding();
        if constexpr (kOutputs && kCut) {
            if (shared_.walk.item.waits_for_start(call_)) wait_for_start(at_.number);
        }
        Base::start();
        // NOTE: two loops, because instructions that are hardly ever needed would lie among those that always are, and
        // all roles together have more of them than the caches of instructions hold.
        if (!kOutputs || forward_params().o_mapped) {
            walk<true>();
        } else {
            walk<false>();
        }
        if constexpr (kOutputs) {
            if (at_.segment.last && Base::next_checkpoint_ == at_.span.length) keep_checkpoint();
        }
        state_.scale(decayed_);
        unit_ = inverse_of_power(inverse_unit_);
        if constexpr (kOutputs) {
            if constexpr (kCut) {
                if (at_.segment.last && at_.segment.index > 0 && final_is_initial(call_, at_)) {
                    wait_for_start(at_.number - at_.segment.index);
                }
            }
            Base::finish();
        } else {
            store_end();
            announce_end();
        }
    }
    __device__ __forceinline__ void store_end() {
        Base::to_real_units();
        float* to = params_.states.ends + (at_.number * p_.heads_v + at_.head) * end_elements(p_);
        if (at_.transition) {
            TransitionBlocks::store(to + end_state_elements(p_), state_);
        } else {
            state_.store_rows(to, at_.v0, p_.dim_v, p_.dim_k);
        }
    }

    // Until the start state of a segment is stored, by a carry or what kept it.
    __device__ __forceinline__ void wait_for_start(std::int64_t segment) const {
        if (threadIdx.x == 0) {
            wait_for_count(params_.states.stored_starts + segment * p_.heads_v + at_.head,
                           static_cast<std::uint32_t>(p_.dim_v));
        }
        sync_threads<Config::kMeeting, Config::kWalkers>();
    }
    // The end or transition of a segment is stored, and what it kept.
    __device__ __forceinline__ void announce_end() const {
        sync_threads<Config::kMeeting, Config::kWalkers>();
        if (threadIdx.x != 0) return;
        const std::int64_t row = at_.number * p_.heads_v + at_.head;
        const int columns = min(Config::kColumns, (at_.transition ? p_.dim_k : p_.dim_v) - at_.v0);
        announce(params_.states.stored_ends + row, static_cast<std::uint32_t>(columns));
        if (Base::start_is_kept()) announce(params_.states.stored_starts + row, static_cast<std::uint32_t>(columns));
    }

    static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x / 32); }
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
    __device__ __forceinline__ ForwardKept& kept() const { return shared_.kept[warp()]; }

    // kBoxes: outputs leave by the tensor map.
    template <bool kBoxes>
    __device__ __forceinline__ void walk() {
        Turn<Config::kTurns> chunk{kept().chunk};
        int stage = kept().stage;
        for (;;) {
            // To the next checkpoint, if the segment has one before its end; to its beginning, where nothing is stored.
            std::int32_t chunks = shared_.walk.item.chunks;
            bool stores = kOutputs;
            if constexpr (kOutputs) {
                const std::int32_t next = Base::next_checkpoint_;
                const auto first = static_cast<std::int32_t>(at_.segment.first_token);
                if (next >= 0) chunks = min(chunks, at_.warm + (next - first) / kChunk);
                if (chunk.n - shared_.walk.first_chunk < static_cast<std::uint32_t>(at_.warm)) {
                    chunks = at_.warm;
                    stores = false;
                }
                kept().next_checkpoint = next;
            }
            kept().until = shared_.walk.first_chunk + chunks;
            kept().stores = stores;
            kept().outputs_from = stores ? chunk.n : kept().until;
            bool more = chunk.n != kept().until, outputs = false;
            if (more) shared_.triangles_full[chunk.stage()].wait(chunk.round());
#pragma unroll 1
            while (more) {
                more = step<kBoxes>(outputs, stage, chunk);
                __syncwarp();
                if (lane() == 0) {
                    shared_.triangles_empty[chunk.stage()].arrive();
                    shared_.rows_empty[stage].arrive();
                    shared_.factors_empty[Turn<Config::kFactors>{chunk.n}.stage()].arrive();
                }
                stage = stage + 1 < Config::kStages ? stage + 1 : 0;
                ++chunk.n;
            }
            if (outputs) {
                take_outputs<kBoxes>(chunk);
                if constexpr (kBoxes) send_outputs(chunk);
            }
            if constexpr (kOutputs) Base::next_checkpoint_ = kept().next_checkpoint;
            const bool stored = kOutputs && kept().stores;
            __syncwarp();  // before another lane writes the next ones
            if (chunk.n == shared_.walk.first_chunk + shared_.walk.item.chunks) break;
            if constexpr (kOutputs) {
                if (stored) keep_checkpoint();
            }
        }
        kept().chunk = chunk.n;
        kept().stage = stage;
    }

    static __device__ __forceinline__ float inverse_of_power(float power_of_two) {
        return __uint_as_float(0x7f000000u - __float_as_uint(power_of_two));
    }

    // The state after the chunks so far, which the next checkpoint wants.
    __device__ __forceinline__ void keep_checkpoint() {
        unit_ = inverse_of_power(inverse_unit_);
        state_.scale(decayed_);
        Base::keep_checkpoint(Base::next_checkpoint_);
        state_.scale(1.0f / decayed_);
    }

    // The products of a chunk; whether there is one behind it. outputs: those of the one before are still in the
    // registers; then whether this one's are.
    template <bool kBoxes>
    __device__ __forceinline__ bool step(bool& outputs, int stage, const Turn<Config::kTurns>& chunk) {
        constexpr Element kType{};
        constexpr __half kHalf{};
        const auto turn = static_cast<int>(chunk.stage());
        ForwardRows<Config>& rows = shared_.rows[stage];
        const ForwardFactors& factors = shared_.factors[Turn<Config::kFactors>{chunk.n}.stage()];
        // Operands are those of the first stage and turn, plus one number each.
        using Solve = SwizzledTile<F16Operand, 64, 64>;
        const std::uint32_t of_rows = uniform(stage * sizeof(rows)),
                            of_solve = uniform(turn * sizeof(ForwardTriangles)),
                            of_attention = uniform(turn * sizeof(shared_.attention[0]));
        const auto keys = shared_.rows[0].k.along_k(of_rows), queries = shared_.rows[0].q.along_k(of_rows);
        const auto keys_across = shared_.rows[0].k.across_k(of_rows);
        const auto solve = shared_.triangles[0].solve.along_k(of_solve);
        const auto attention = shared_.attention[0].along_k(of_attention);

        // NOTE: there is nothing left to wait for, but the compiler does not see that across the loop.
        wgmma_wait<0>();
        settle(state_.s);
        if constexpr (kOutputs) settle(o_);
        // Once, and again if the residuals were not in fp16's range, which is looked at while they are multiplied.
        float x[2][4][4];
        const int own = TokenVector::own();
        float4 keep[2];
        bool again;
        do {
            float u[8][4];
            Fragment<Op> state[kK / 16];
#pragma unroll
            for (int k = 0; k < kK / 16; ++k) {
                state[k] = state_.template operand<Op>(k);
                settle(state[k].x[0]);
            }
            wgmma_fence();
            wgmma<false, Rows::along_k>(u, state[0].x[0], keys(0), kType);
#pragma unroll
            for (int k = 1; k < kK / 16; ++k) wgmma<true, Rows::along_k>(u, state[k].x[0], keys(16 * k), kType);
            wgmma_commit();
            if constexpr (kOutputs) {
                if (outputs) take_outputs<kBoxes>(chunk);
                wgmma_fence();
                wgmma<false, Rows::along_k>(o_, state[0].x[0], queries(0), kType);
#pragma unroll
                for (int k = 1; k < kK / 16; ++k) wgmma<true, Rows::along_k>(o_, state[k].x[0], queries(16 * k), kType);
                wgmma_commit();
                if (kBoxes && outputs) send_whole_outputs(chunk);
                outputs = false;
            }
            // NOTE: made here, before the wait, or the compiler keeps it in local memory.
            const int thread = only_here(static_cast<int>(threadIdx.x)) & 255;
            const std::uint32_t values =
                shared_address(rows.values.x) + Values::a_transposed_place(thread & 31, 0, thread / 32 * 16);
            wgmma_wait<0>();
            settle(u);
            if constexpr (kOutputs) settle(o_);
            Half residual[kBlocks];
            take_residual(residual, u, values, factors, own);
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) settle(residual[b].x[0]);
            wgmma_fence();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int n = 32 * half;
                wgmma<false, Rows::along_k>(x[half], residual[2 * half].x[0], Solve::part(solve, n, n), kHalf);
                wgmma<true, Rows::along_k>(x[half], residual[2 * half + 1].x[0], Solve::part(solve, n, n + 16), kHalf);
            }
            wgmma_commit();
            const float change = change_of_unit(residual), decay = factors.decay;
            keep[0] = factors.keep.of_block(0, own), keep[1] = factors.keep.of_block(1, own);
            // NOTE: before the group meets, after which the tile of outputs is written again.
            if constexpr (kOutputs) wait_until_boxes_are_read();
            again = any_of_128(1 + warp() / 4, change != 1.0f);
            wgmma_wait<0>();
#pragma unroll
            for (int half = 0; half < 2; ++half) settle(x[half]);
            // NOTE: all warps of a group repeat its products, or none.
            const float factor = again ? change : decay;
            if (factor != 1.0f) state_.scale(factor);
            if (again) inverse_unit_ *= change;
        } while (again);
        // The product that solves comes before those that add to outputs and state.
        Half solved[2];
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            solved[b] = Half::of(x[0][2 * b], x[0][2 * b + 1]);
            settle(solved[b].x[0]);
        }
        wgmma_fence();
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            wgmma<true, Rows::along_k>(x[1], solved[b].x[0], Solve::part(solve, 32, 16 * b), kHalf);
        }
        wgmma_commit();
        __syncwarp();
        if (is_elected()) shared_.values_empty[stage].arrive();
        if constexpr (kOutputs) {
#pragma unroll
            for (int n = 0; n < kBlocks; ++n)
                scale_columns_of(o_[2 * n], o_[2 * n + 1], factors.query.of_block(n, own));
            settle(o_);
        }
        Fragment<Op> deltas[kBlocks], leaving[kBlocks];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (half == 1) {
                wgmma_wait<1>();
                settle(x[1]);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int b = 2 * half + i;
                auto& left = x[half][2 * i];
                auto& right = x[half][2 * i + 1];
                if constexpr (kOutputs) deltas[b] = Fragment<Op>::of(left, right);
                scale_columns_of(left, right, keep[i]);
                if (half == 0) keep[i] = factors.keep.of_block(b + 2, own);
                leaving[b] = Fragment<Op>::of(left, right);
                if constexpr (kOutputs) settle(deltas[b].x[0]);
                settle(leaving[b].x[0]);
            }
            wgmma_fence();
#pragma unroll
            for (int b = 2 * half; b < 2 * half + 2; ++b) {
                if constexpr (kOutputs) wgmma<true, Rows::along_k>(o_, deltas[b].x[0], attention(16 * b), kType);
                wgmma<true, Rows::across_k>(state_.s, leaving[b].x[0], keys_across(16 * b), kType);
            }
            wgmma_commit();
        }
        decayed_ = factors.state;
        // What the next chunk begins with, beside the last products of this one.
        const Turn<Config::kTurns> next{chunk.n + 1};
        const ForwardKept& kept = this->kept();
        const bool more = next.n != kept.until;
        if constexpr (kOutputs) outputs = static_cast<int>(next.n - kept.outputs_from) > 0;
        if (more) shared_.triangles_full[next.stage()].wait(next.round());
        wgmma_wait<0>();
        settle(state_.s);
        if constexpr (kOutputs) settle(o_);
        return more;
    }

    // Two neighbouring accumulators times factors of their columns.
    static __device__ __forceinline__ void scale_columns_of(float (&left)[4], float (&right)[4], const float4& f) {
        left[0] *= f.x, left[1] *= f.y, left[2] *= f.x, left[3] *= f.y;
        right[0] *= f.z, right[1] *= f.w, right[2] *= f.z, right[3] *= f.w;
    }

    // ------------------------------------------------------------------------------------------------- residuals

    __device__ __forceinline__ void take_residual(Half (&residual)[kBlocks], const float (&u)[8][4],
                                                  std::uint32_t values_at, const ForwardFactors& factors,
                                                  int own) const {
        const auto unit = __float2bfloat162_rn(inverse_unit_);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            const Fragment<Op> values = Values::a_transposed_at(values_at + 16 * b * Values::kRowBytes);
            const float4 read = factors.read.of_block(b, own);
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const float* reads = &u[2 * b + pair / 2][pair % 2 * 2];
                Pair<Op> scaled;
                scaled.part[0] = times(values.x[0][pair], unit);
                const float2 value = scaled.value();
                residual[b].set(pair, Pair<F16Operand>::of(fmaf(pair < 2 ? -read.x : -read.z, reads[0], value.x),
                                                           fmaf(pair < 2 ? -read.y : -read.w, reads[1], value.y)));
            }
        }
    }
    static __device__ __forceinline__ std::uint32_t times(std::uint32_t pair, __nv_bfloat162 factor) {
        __nv_bfloat162 x;
        memcpy(&x, &pair, sizeof(x));
        return bits_of(__hmul2(x, factor));
    }

    static __device__ __forceinline__ __half2 magnitudes(const Half& x, int pair) {
        __half2 two;
        memcpy(&two, &x.x[0][pair], sizeof(two));
        return __habs2(two);
    }

    // What the unit has to be divided by to bring the warp's largest residual to where fp16 has room for what is made
    // of it, above and below, or a step towards it; 1 if it is there, or no other unit can be taken.
    __device__ __forceinline__ float change_of_unit(const Half (&residual)[kBlocks]) const {
        constexpr float kMost = 0x1p10f, kLeast = 0x1p-4f, kStep = 0x1p12f, kEnd = 0x1p96f;
        __half2 largest[kBlocks];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            largest[b] = __hmax2(__hmax2(magnitudes(residual[b], 0), magnitudes(residual[b], 1)),
                                 __hmax2(magnitudes(residual[b], 2), magnitudes(residual[b], 3)));
        }
        const __half2 all = __hmax2(__hmax2(largest[0], largest[1]), __hmax2(largest[2], largest[3]));
        const float most = fmaxf(__low2float(all), __high2float(all));
        if (__any_sync(kFullWarp, !(most <= kMost))) return inverse_unit_ > 1.0f / kEnd ? 1.0f / kStep : 1.0f;
        return !__any_sync(kFullWarp, most >= kLeast) && inverse_unit_ < kEnd ? kStep : 1.0f;
    }

    // --------------------------------------------------------------------------------------------------- outputs

    // O^T of the chunk before this one to o; with boxes to shared memory, from where send_outputs() takes it on.
    template <bool kBoxes>
    __device__ __forceinline__ void take_outputs(const Turn<Config::kTurns>& chunk) {
        if (inverse_unit_ != 1.0f) {
            const float unit = inverse_of_power(inverse_unit_);
#pragma unroll
            for (int n = 0; n < 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) o_[n][e] *= unit;
        }
        if constexpr (kBoxes) {
            const int thread = only_here(static_cast<int>(threadIdx.x)) & 255;
            turn<Op>(shared_.outputs, thread % 32, thread / 32 * 16, o_);
        } else {
            const int before = chunk_before(chunk), v = 16 * warp();
            store_turned_elements(call_.o, o_at(before, v), tokens_from(before), columns_from(v), o_);
        }
    }
    // Of a chunk that is not the item's last. NOTE: one warp waits for the others, which go on.
    __device__ __forceinline__ void send_whole_outputs(const Turn<Config::kTurns>& chunk) const {
        fence_for_wgmma();
        const int number = 3 + warp() / 4;
        if (warp() % 4 != 0) {
            arrive_128(number);
            return;
        }
        // NOTE: loaded before the wait.
        const ForwardItem& item = shared_.walk.item;
        const int column = item.place.v0 + warp() / 4 * 64, head = item.place.head, batch = item.batch,
                  token = item.token + chunk_before(chunk) * kChunk;
        sync_128(number);
        if (is_elected()) {
            store_box(forward_params().o_map, outputs_panel(), column, head, token, batch);
        }
    }
    __device__ __forceinline__ void send_outputs(const Turn<Config::kTurns>& chunk) const {
        const int before = chunk_before(chunk), tokens = tokens_from(before);
        fence_for_wgmma();
        sync_128(3 + warp() / 4);
        if (tokens < kChunk) {
            const int v = warp() / 4 * 64;
            store_lines<Op>(call_.o, o_at(before, v), tokens, columns_from(v), shared_.outputs, v);
        } else if (warp() % 4 == 0 && is_elected()) {
            const ForwardItem& item = shared_.walk.item;
            store_box(forward_params().o_map, outputs_panel(), item.place.v0 + warp() / 4 * 64, item.place.head,
                      item.token + before * kChunk, item.batch);
        }
    }
    __device__ __forceinline__ const char* outputs_panel() const {
        return reinterpret_cast<const char*>(shared_.outputs.x) + warp() / 4 * decltype(shared_.outputs)::kPanelBytes;
    }
    // The item's chunk before this one, its tokens, and columns of o from the item's v-th on.
    __device__ __forceinline__ int chunk_before(const Turn<Config::kTurns>& chunk) const {
        return static_cast<int>(chunk.n - shared_.walk.first_chunk) - 1;
    }
    __device__ __forceinline__ int tokens_from(int chunk) const { return shared_.walk.item.tokens - chunk * kChunk; }
    __device__ __forceinline__ int columns_from(int v) const { return shared_.walk.item.columns - v; }
    // Where these columns of the chunk begin in o.
    __device__ __forceinline__ std::int64_t o_at(int before, int v) const {
        const ForwardItem& item = shared_.walk.item;
        return call_.o.offset(item.batch, item.token + before * kChunk, item.place.head) + item.place.v0 + v;
    }
    __device__ __forceinline__ const ForwardParams& forward_params() const {
        return static_cast<const ForwardParams&>(params_);
    }

    ForwardShared<Config>& shared_;
    float o_[8][4];
    float decayed_ = 1.0f;  // what the state is divided by (ForwardFactors::state)
};

}  // namespace flashqla::cuda::sm90
