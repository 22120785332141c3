// One block computes one (sequence, value head, tile of V columns), token by token, with the tile in registers.
//
// Both reads of a token use the state before it:  with a = exp(g), u = S^T k, r = S^T q (norms and scale folded in),
//   d = beta (v - a u),   o = a r + (k . q) d,   S <- a S + k d^T
// so a token costs one exchange between threads and not two. The columns of a state do not depend on each other.
#pragma once

#include <type_traits>

#include "cuda/device/gates.cuh"
#include "cuda/device/grid_order.cuh"
#include "cuda/device/memory.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/device/tail.cuh"
#include "cuda/sm80/recurrent/config.cuh"
#include "cuda/sm80/recurrent/tile.cuh"

namespace flashqla::cuda::sm80 {

template <class Config, class Call>
class Recurrence {
public:
    static constexpr bool kDecode = std::is_same_v<Call, DecodeCall>;

    __device__ __forceinline__ Recurrence(const Call& call, RecurrentShared<Config>& shared, std::int64_t n,
                                          std::int32_t head, int v0)
        : call_(call),
          p_(call.problem),
          shared_(shared),
          n_(n),
          head_(head),
          v0_(v0),
          span_(clamped_span(call, n)),
          slots_(clamped_slots(call, n)),
          gate_(call, head) {}

    __device__ __forceinline__ void run() {
        if (slots_.padding) return run_padding();
        if constexpr (kDecode) {
            if (span_.length == 0 && slots_.read == slots_.write) return;
        }
        point_to_first_token();
        if (span_.length > 0) fetch(0);  // before the state, which may have to wait for its slot number
        start();
        if constexpr (kDecode) {
            decode_tokens();
        } else {
            forward_tokens();
        }
        if (slots_.write >= 0) tile_.store(state_out(), p_, slots_.write, head_, v0_);
    }

private:
    __device__ __forceinline__ const StateRef& state_in() const {
        if constexpr (kDecode)
            return call_.state;
        else
            return call_.initial_state;
    }
    __device__ __forceinline__ const StateRef& state_out() const {
        if constexpr (kDecode)
            return call_.state;
        else
            return call_.final_state;
    }

    // The start state, zeros where none is read.
    __device__ __forceinline__ void start() {
        if (slots_.read >= 0) {
            tile_.load(state_in(), p_, slots_.read, head_, v0_);
        } else {
            tile_.zero();
        }
    }

    __device__ __forceinline__ void forward_tokens() {
        CheckpointCursor cursor(call_, n_, span_.length);
        const auto keep = [&](std::int64_t row) { tile_.store(call_.checkpoints, p_, row, head_, v0_); };
        for (std::int64_t t = 0; t < span_.length; ++t) {
            if (t == cursor.next()) cursor.visit(keep);
            step(t);
        }
        if (span_.length == cursor.next()) cursor.visit(keep);
    }

    __device__ __forceinline__ void decode_tokens() {
        std::int64_t kept = intermediate_row(call_, n_);
        if (kept >= call_.intermediate_states.rows) kept = -1;
        const std::int64_t places = kept >= 0 ? call_.intermediate_steps : 0;
        for (std::int64_t t = 0; t < span_.length; ++t) {
            if (call_.parent_tokens && t < call_.parent_tokens.columns && t <= places) {
                const std::int64_t parent = call_.parent_tokens.at(n_, t);
                if (parent < 0 && t > 0) start();
                // A parent that does not come before its token is malformed; the token before takes its place.
                if (parent >= 0 && parent < t - 1) {
                    tile_.load(call_.intermediate_states, p_, kept, head_, v0_,
                               parent * call_.intermediate_states.step);
                }
            }
            step(t);
            if (t < places) {
                tile_.store(call_.intermediate_states, p_, kept, head_, v0_, t * call_.intermediate_states.step);
            }
            const std::int64_t slot = token_slot(call_, n_, t);
            if (slot >= 0 && slot < call_.state.rows) tile_.store(call_.state, p_, slot, head_, v0_);
        }
    }

    // A padding row: outputs and checkpoints are zero, no slot is touched.
    __device__ __forceinline__ void run_padding() {
        for (std::int64_t i = threadIdx.x; i < span_.length * Config::kColumns; i += Config::kThreads) {
            const int v = v0_ + static_cast<int>(i % Config::kColumns);
            const std::int64_t t = span_.begin + i / Config::kColumns;
            if (v < p_.dim_v) {
                store_element(call_.o.data, call_.o.dtype, call_.o.offset(span_.batch, t, head_) + v, 0.0f);
            }
        }
        if constexpr (!kDecode) {
            tile_.zero();
            CheckpointCursor cursor(call_, n_, span_.length);
            while (cursor.next() >= 0) {
                cursor.visit([&](std::int64_t row) { tile_.store(call_.checkpoints, p_, row, head_, v0_); });
            }
        }
    }

    // ------------------------------------------------------------------------------------------------ operands

    // Elements of the token that comes next, as bits: in flight while the token before is computed.
    struct Pending {
        std::uint32_t k[Config::kPerThread], q[Config::kPerThread], v, g, beta;
    };

    __device__ __forceinline__ void point_to_first_token() {
        const std::int32_t key = call_.key_head(head_);
        k_at_ = call_.k.offset(span_.batch, span_.begin, key);
        q_at_ = call_.q.offset(span_.batch, span_.begin, key);
        v_at_ = call_.v.offset(span_.batch, span_.begin, head_) + v0_;
        o_at_ = call_.o.offset(span_.batch, span_.begin, head_) + v0_;
    }

    __device__ __forceinline__ void fetch(std::int64_t t) {
        const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
        for (int i = 0; i < Config::kPerThread; ++i) {
            const int k = thread + i * Config::kThreads;
            const bool inside = k < p_.dim_k;
            next_.k[i] = inside ? load_bits(call_.k.data, p_.io, k_at_ + k) : 0;
            next_.q[i] = inside ? load_bits(call_.q.data, p_.io, q_at_ + k) : 0;
        }
        const bool inside = thread < Config::kColumns && v0_ + thread < p_.dim_v;
        next_.v = inside ? load_bits(call_.v.data, p_.io, v_at_ + thread) : 0;
        next_.g =
            call_.g ? load_bits(call_.g.data, call_.g.dtype, call_.g.offset(span_.batch, span_.begin + t, head_)) : 0;
        next_.beta = call_.beta ? load_bits(call_.beta.data, call_.beta.dtype,
                                            call_.beta.offset(span_.batch, span_.begin + t, head_))
                                : 0;
        k_at_ += call_.k.token;
        q_at_ += call_.q.token;
        v_at_ += call_.v.token;
    }

    // The fetched token into shared memory, with the sums that norms and k . q need.
    __device__ __forceinline__ void stage(int buffer) {
        const int thread = static_cast<int>(threadIdx.x);
        float kk = 0.0f, qq = 0.0f, kq = 0.0f;
#pragma unroll
        for (int i = 0; i < Config::kPerThread; ++i) {
            const float k = float_of_bits(next_.k[i], p_.io), q = float_of_bits(next_.q[i], p_.io);
            if (thread + i * Config::kThreads < Config::kK) {
                shared_.k[buffer][thread + i * Config::kThreads] = k;
                shared_.q[buffer][thread + i * Config::kThreads] = q;
            }
            kk = fmaf(k, k, kk);
            qq = fmaf(q, q, qq);
            kq = fmaf(k, q, kq);
        }
        if (thread < Config::kColumns) shared_.v[buffer][thread] = float_of_bits(next_.v, p_.io);
        if (p_.qk_l2norm) {
            kk = warp_sum(kk);
            qq = warp_sum(qq);
        }
        kq = warp_sum(kq);
        if (thread % 32 == 0) {
            shared_.sums[buffer][0][thread / 32] = kk;
            shared_.sums[buffer][1][thread / 32] = qq;
            shared_.sums[buffer][2][thread / 32] = kq;
        }
    }

    __device__ __forceinline__ float block_sum(int buffer, int which) const {
        const float4 x = *reinterpret_cast<const float4*>(shared_.sums[buffer][which]);
        return (x.x + x.y) + (x.z + x.w);
    }

    // --------------------------------------------------------------------------------------------------- a token

    struct Factors {
        float decay, beta, k, q, kq;  // k and q: what their rows are multiplied by; scale is in q
    };

    __device__ __forceinline__ void step(std::int64_t t) {
        const int buffer = static_cast<int>(t & 1);
        stage(buffer);
        Factors f;
        f.decay = gate_.decay(call_, next_.g);
        f.beta = beta_of(call_, next_.beta);
        if (t + 1 < span_.length) fetch(t + 1);
        __syncthreads();
        f.k = 1.0f;
        f.q = p_.scale;
        if (p_.qk_l2norm) {
            f.k = 1.0f / sqrtf(block_sum(buffer, 0) + p_.l2norm_eps);
            f.q = p_.scale / sqrtf(block_sum(buffer, 1) + p_.l2norm_eps);
        }
        f.kq = block_sum(buffer, 2) * f.k * f.q;
        if constexpr (Config::kVFirst) {
            step_vk(buffer, f);
        } else {
            step_kv(buffer, f);
        }
        o_at_ += call_.o.token;
    }

    __device__ __forceinline__ static void four_of(const float* p, float factor, float (&x)[4]) {
        const float4 four = *reinterpret_cast<const float4*>(p);
        x[0] = four.x * factor, x[1] = four.y * factor, x[2] = four.z * factor, x[3] = four.w * factor;
    }

    __device__ __forceinline__ void store_output(int v, float o) const {
        if (v0_ + v < p_.dim_v) store_element(call_.o.data, call_.o.dtype, o_at_ + v, o);
    }

    __device__ __forceinline__ void step_vk(int buffer, const Factors& f) {
        constexpr int kRows = Config::kRows, kGroupsK = Config::kGroupsK, kLanes = Config::kLanes;
        const int lane = static_cast<int>(threadIdx.x) % kLanes;
        float k[kGroupsK][4], q[kGroupsK][4];
#pragma unroll
        for (int c = 0; c < kGroupsK; ++c) {
            four_of(shared_.k[buffer] + Tile<Config>::begin(c), f.k, k[c]);
            four_of(shared_.q[buffer] + Tile<Config>::begin(c), f.q, q[c]);
        }
        float u[kRows], r[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            u[i] = r[i] = 0.0f;
#pragma unroll
            for (int c = 0; c < kGroupsK; ++c)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float s = tile_.s[i * kGroupsK + c][j];
                    u[i] = fmaf(s, k[c][j], u[i]);
                    r[i] = fmaf(s, q[c][j], r[i]);
                }
        }
        const float read_k = sum_rows<kRows, kLanes>(u, lane), read_q = sum_rows<kRows, kLanes>(r, lane);
        const int v = static_cast<int>(threadIdx.x) / kLanes * kRows + lane % kRows;
        const float mine = f.beta * fmaf(-f.decay, read_k, shared_.v[buffer][v]);
        if (lane < kRows) store_output(v, fmaf(f.kq, mine, f.decay * read_q));
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const float delta = __shfl_sync(kFullWarp, mine, i, kLanes);
#pragma unroll
            for (int c = 0; c < kGroupsK; ++c)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float& s = tile_.s[i * kGroupsK + c][j];
                    s = fmaf(k[c][j], delta, f.decay * s);
                }
        }
    }

    __device__ __forceinline__ void step_kv(int buffer, const Factors& f) {
        constexpr int kGroups = Config::kGroups, kLanesV = Config::kLanesV;
        const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
        const int v = Tile<Config>::begin(0);
        float k[kGroups], u[4] = {}, r[4] = {};
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            k[g] = shared_.k[buffer][Tile<Config>::row(g)] * f.k;
            const float q = shared_.q[buffer][Tile<Config>::row(g)] * f.q;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                u[j] = fmaf(tile_.s[g][j], k[g], u[j]);
                r[j] = fmaf(tile_.s[g][j], q, r[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u[j] = sum_lanes<kLanesV, 32>(u[j]);
            r[j] = sum_lanes<kLanesV, 32>(r[j]);
        }
        if (lane < kLanesV) {
            *reinterpret_cast<float4*>(shared_.reads[warp][0] + v) = make_float4(u[0], u[1], u[2], u[3]);
            *reinterpret_cast<float4*>(shared_.reads[warp][1] + v) = make_float4(r[0], r[1], r[2], r[3]);
        }
        __syncthreads();
        // NOTE: the next write to `reads` lies behind the barrier of the next token.
#pragma unroll
        for (int j = 0; j < 4; ++j) u[j] = r[j] = 0.0f;
#pragma unroll
        for (int w = 0; w < Config::kWarps; ++w) {
            float part[4];
            four_of(shared_.reads[w][0] + v, 1.0f, part);
#pragma unroll
            for (int j = 0; j < 4; ++j) u[j] += part[j];
            four_of(shared_.reads[w][1] + v, 1.0f, part);
#pragma unroll
            for (int j = 0; j < 4; ++j) r[j] += part[j];
        }
        float delta[4], value[4];
        four_of(shared_.v[buffer] + v, 1.0f, value);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            delta[j] = f.beta * fmaf(-f.decay, u[j], value[j]);
            // Every warp has every column; each stores one in four.
            if (j == warp && lane < kLanesV) store_output(v + j, fmaf(f.kq, delta[j], f.decay * r[j]));
        }
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
#pragma unroll
            for (int j = 0; j < 4; ++j) tile_.s[g][j] = fmaf(k[g], delta[j], f.decay * tile_.s[g][j]);
    }

    const Call& call_;
    const Problem& p_;
    RecurrentShared<Config>& shared_;
    const std::int64_t n_;
    const std::int32_t head_;
    const int v0_;
    const Span span_;
    const Slots slots_;
    const HeadGate gate_;
    Tile<Config> tile_;
    Pending next_;
    std::int64_t k_at_, q_at_, v_at_, o_at_;  // of the token to fetch; o_at_ of the one computed
};

template <class Config, class Call>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    recurrent_kernel(const __grid_constant__ Call call, const __grid_constant__ RecurrentGrid grid) {
    __shared__ RecurrentShared<Config> shared;
    wait_for_earlier_grids();
    if (blockIdx.x >= grid.state_blocks) {
        return zero_tail(call, call.o, call.problem.heads_v, call.problem.dim_v, blockIdx.x - grid.state_blocks,
                         grid.zero_blocks);
    }
    const auto heads = static_cast<std::uint32_t>(call.problem.heads_v);
    const std::uint32_t tile = blockIdx.x % grid.tiles, row = blockIdx.x / grid.tiles;
    Recurrence<Config, Call> recurrence(call, shared, row / heads, static_cast<std::int32_t>(row % heads),
                                        static_cast<int>(tile) * Config::kColumns);
    recurrence.run();
}

}  // namespace flashqla::cuda::sm80
