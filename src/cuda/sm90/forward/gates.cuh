// The warp that makes factors of gates and norms, chunks ahead; a lane has two neighbouring tokens.
#pragma once

#include "cuda/device/fast_exp.cuh"
#include "cuda/device/gates.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/sm90/forward/config.cuh"

namespace flashqla::cuda::sm90 {

template <class Config>
class ForwardGates : ForwardRole<Config> {
    using Role = ForwardRole<Config>;
    using Op = typename Config::Op;
    using Role::call;
    using Role::lane;
    using Role::shared;

public:
    __device__ __forceinline__ ForwardGates(const Role& role) : Role(role) {}

    __device__ __forceinline__ void run() {
        // NOTE: two loops, as in the walk: what most calls do, and everything.
        const Problem& p = call.problem;
        if (p.gate == Gate::log && p.beta_mode != BetaMode::logit && !p.qk_l2norm && call.g && call.beta &&
            call.g.dtype == DType::f32) {
            run_all<true>();
        } else {
            run_all<false>();
        }
    }

private:
    template <bool kPlain>
    __device__ __forceinline__ void run_all() {
        ForwardItems<Config> items(shared);
#pragma unroll 1
        for (;;) {
            const ForwardItem& item = items.next();
            if (item.work == ForwardWork::no_more) break;
            if (item.chunks > 0) run<kPlain>(item);
            items.release();
        }
    }

    template <bool kPlain>
    __device__ __forceinline__ void run(const ForwardItem& item) {
        const StatePlace& at = item.place;
        const std::int64_t t = item.token;
        int tokens = item.tokens;
        if constexpr (!kPlain) gate_ = HeadGate(call, at.head);
        since_ = 0.0f;
        g_at_ = call.g ? call.g.offset(item.batch, t, at.head) : 0;
        beta_at_ = call.beta ? call.beta.offset(item.batch, t, at.head) : 0;
        load<kPlain>(tokens);
#pragma unroll 1
        for (std::int32_t c = item.chunks; c > 0; --c, tokens -= Config::kChunk) {
            const Tokens now = next_;
            if (c > 1) load<kPlain>(tokens - Config::kChunk);
            const std::uint32_t stage = turn_.stage();
            shared.factors_empty[stage].wait(turn_.round() ^ 1);
            make<kPlain>(now, tokens, shared.factors[stage]);
            __syncwarp();
            if (lane() == 0) shared.factors_full[stage].arrive();
            ++turn_.n;
            if (!kPlain) place_.next();
        }
    }

    struct Tokens {
        std::uint32_t g[2], beta[2];  // bits
    };

    // A running sum of g as two floats: under strong gates one no longer resolves the weak ones in between.
    struct Sum {
        float high = 0.0f, low = 0.0f;

        Sum() = default;
        __device__ __forceinline__ explicit Sum(double x)
            : high(static_cast<float>(x)), low(static_cast<float>(x - high)) {}
        __device__ __forceinline__ Sum of_lane(int lane) const {
            Sum sum;
            sum.high = __shfl_sync(kFullWarp, high, lane);
            sum.low = __shfl_sync(kFullWarp, low, lane);
            return sum;
        }
        __device__ __forceinline__ float operator-(const Sum& other) const {
            return (high - other.high) + (low - other.low);
        }
    };

    // Asks for g and beta. Tokens past the end are the last one here, so that no load waits for a comparison.
    template <bool kPlain>
    __device__ __forceinline__ void load(int tokens) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int token = min(2 * lane() + j, tokens - 1);
            next_.g[j] = kPlain || call.g
                             ? load_bits(call.g.data, kPlain ? DType::f32 : call.g.dtype, g_at_ + token * call.g.token)
                             : 0;
            next_.beta[j] = kPlain || call.beta
                                ? load_bits(call.beta.data, call.beta.dtype, beta_at_ + token * call.beta.token)
                                : 0;
        }
        g_at_ += Config::kChunk * call.g.token;
        beta_at_ += Config::kChunk * call.beta.token;
    }

    template <bool kPlain>
    __device__ __forceinline__ void make(const Tokens& from, int tokens, ForwardFactors& to) {
        double gamma[2];
        float beta[2], n_k[2], n_q[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const bool inside = 2 * lane() + j < tokens;
            if constexpr (kPlain) {
                gamma[j] = inside ? smallest_log_decay(__uint_as_float(from.g[j])) : 0.0f;
                beta[j] = inside ? call.problem.beta_factor * float_of_bits(from.beta[j], call.beta.dtype) : 0.0f;
            } else {
                gamma[j] = call.g && inside ? gate_.log_decay(call, from.g[j]) : 0.0f;
                beta[j] = inside ? beta_of(call, from.beta[j]) : 0.0f;
            }
            n_k[j] = inside ? 1.0f : 0.0f;
            n_q[j] = inside ? call.problem.scale : 0.0f;
        }
        if (!kPlain && call.problem.qk_l2norm) {
            shared.rows_full[place_.stage].wait(place_.round);
            norms(to, shared.rows[place_.stage]);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float2 k = to.norm_k.pair(lane()), q = to.norm_q.pair(lane());
                n_k[j] *= j == 0 ? k.x : k.y, n_q[j] *= j == 0 ? q.x : q.y;
            }
        }
        gamma[1] += gamma[0];
        const double before = warp_prefix(gamma[1]) - gamma[1];
        const Sum sum[2] = {Sum(gamma[0] + before), Sum(gamma[1] + before)};
        Sum block_end[4];  // the last is the chunk's
#pragma unroll
        for (int block = 0; block < 4; ++block) block_end[block] = sum[1].of_lane(8 * block + 7);
        to.high.set_pair(lane(), sum[0].high, sum[1].high);
        to.low.set_pair(lane(), sum[0].low, sum[1].low);
        to.norm_k.set_pair(lane(), n_k[0], n_k[1]);
        to.norm_q.set_pair(lane(), n_q[0], n_q[1]);
        to.beta[lane()] = __floats2half2_rn(beta[0], beta[1]);
        Sum start;
#pragma unroll
        for (int block = 1; block < 4; ++block) {
            if (lane() >= 8 * block) start = block_end[block - 1];
            // NOTE: what is not before the block is not read.
            to.to_block[block - 1].set_pair(lane(), fast_exp(block_end[block - 1] - sum[0]) * n_k[0],
                                            fast_exp(block_end[block - 1] - sum[1]) * n_k[1]);
        }
        const float row[2] = {fast_exp(sum[0] - start), fast_exp(sum[1] - start)};
        to.row_k.set_pair(lane(), row[0] * n_k[0], row[1] * n_k[1]);
        to.row_q.set_pair(lane(), row[0] * n_q[0], row[1] * n_q[1]);

        // NOTE: the state is scaled before its decay becomes so strong that what is kept is too large for its inverse.
        constexpr float kMost = -30.0f;
        const float total = block_end[3].high, e[2] = {fast_exp(since_ + sum[0].high), fast_exp(since_ + sum[1].high)};
        const bool scaled = since_ + total < kMost;
        const float after = scaled ? 0.0f : since_ + total;
        to.read.set_pair(lane(), e[0] * n_k[0], e[1] * n_k[1]);
        to.query.set_pair(lane(), e[0] * n_q[0], e[1] * n_q[1]);
        to.keep.set_pair(lane(), fast_exp((block_end[3] - sum[0]) - after) * n_k[0],
                         fast_exp((block_end[3] - sum[1]) - after) * n_k[1]);
        if (lane() == 0) {
            to.decay = scaled ? fast_exp(since_ + total) : 1.0f;
            to.state = fast_exp(after);
        }
        since_ = after;
    }

    // 1 / |k_i| and 1 / |q_i|, a row at a time.
    __device__ __forceinline__ void norms(ForwardFactors& to, const ForwardRows<Config>& rows) {
#pragma unroll 1
        for (int i = lane(); i < Config::kChunk; i += 32) {
            const float k = square(rows.k, i), q = square(rows.q, i), eps = call.problem.l2norm_eps;
            to.norm_k.x[TokenVector::place(i)] = 1.0f / sqrtf(k + eps);
            to.norm_q.x[TokenVector::place(i)] = 1.0f / sqrtf(q + eps);
        }
        __syncwarp();
    }
    template <class Tile>
    static __device__ __forceinline__ float square(const Tile& tile, int row) {
        float sum = 0.0f;
#pragma unroll 4
        for (int column = 0; column < Config::kK; column += 8) {
            const uint4 eight =
                *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(tile.x) + Tile::offset(row, column));
            const std::uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
            for (const std::uint32_t pair : pairs) {
                const float2 x = unpack(pair, typename Op::Element{});
                sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
            }
        }
        return sum;
    }

    HeadGate gate_;
    Turn<Config::kFactors> turn_;
    RingPlace<Config::kStages> place_;     // of rows
    std::int64_t g_at_ = 0, beta_at_ = 0;  // of the next chunk to load
    float since_ = 0.0f;                   // sum of g since the state was last scaled
    Tokens next_;
};

}  // namespace flashqla::cuda::sm90
