// One block prepares one chunk of one key head for the value heads that read it, or a share of them.
//
//   KK = K K^T, QK = Q K^T       once, in registers
//   for each value head:  L = stril(beta Gamma o K^ K^^T),  T = (I + L)^-1,  P = tril(Gamma o Q^ K^^T)
//
// T is computed in blocks of 16: the diagonal ones by forward substitution in fp32, one column a lane; then each warp
// solves for 16 columns, T_bw = -D_b sum_{w <= j < b} L_bj T_jw, transposed, so that every result is the next product's
// A fragment. No series of powers and no bound on the keys is assumed.
#pragma once

#include "cuda/device/chunks.cuh"
#include "cuda/device/gates.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/sm80/prepare/config.cuh"

namespace flashqla::cuda::sm80 {

template <class Config>
class ChunkPreparation {
    using Op = typename Config::Op;
    using Exact = F32Operand;
    static constexpr int kChunk = Config::kChunk, kBlocks = Config::kBlocks;

public:
    __device__ __forceinline__ ChunkPreparation(const PrepareParams& params, PrepareShared<Config>& shared,
                                                const Chunk& chunk, std::int64_t number, std::int32_t key_head)
        : params_(params), in_(params.in), shared_(shared), chunk_(chunk), number_(number), key_head_(key_head) {}

    // For value heads begin .. begin + params.share - 1 of the group.
    __device__ __forceinline__ void run(std::int32_t begin) {
        load_rows();
        multiply_rows();
        const std::int32_t end = min(begin + params_.share, in_.group());
        for (std::int32_t i = begin; i < end; ++i) {
            const int slot = (i - begin) % Config::kWarps;
            if (slot == 0) {
                __syncthreads();  // everyone is done with the rows, or with the gates of the heads before
                if (i + warp() < end) fill_gates(in_.value_head(key_head_, i + warp()));
                __syncthreads();
            }
            form_triangles(slot);
            __syncwarp();
            invert_diagonal();
            __syncthreads();
            solve_columns();
            __syncthreads();
            store(in_.value_head(key_head_, i));
            __syncthreads();
        }
    }

private:
    static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x / 32); }
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
    // Where this lane's elements of an accumulator lie: rows row(0), row(1), columns column() and the next of each 8.
    static __device__ __forceinline__ int row(int half) { return 16 * warp() + lane() / 4 + 8 * half; }
    static __device__ __forceinline__ int column() { return 2 * (lane() % 4); }

    // ------------------------------------------------------------------------------------------- rows, products

    __device__ __forceinline__ void load_rows() {
        using Input = typename Op::Input;
        const auto rows_of = [&](const TokenRef& x) {
            const auto* data = static_cast<const Input*>(x.data) + x.offset(chunk_.batch, chunk_.begin, key_head_);
            return GlobalRows<Input>{data, x.token, chunk_.tokens, in_.problem.dim_k};
        };
        fill<Config::kThreads>(shared_.k, rows_of(in_.k));
        fill<Config::kThreads>(shared_.q, rows_of(in_.q));
        copies_commit();
        copies_wait<0>();
        __syncthreads();
        // Norms: two lanes a row.
        const int r = static_cast<int>(threadIdx.x) / 2, part = static_cast<int>(threadIdx.x) % 2;
        float kk = 0.0f, qq = 0.0f;
        if (in_.problem.qk_l2norm) {
            for (int j = 2 * part; j < Config::kK; j += 4) {
                const float2 k = shared_.k.get(r, j).value(), q = shared_.q.get(r, j).value();
                kk = fmaf(k.x, k.x, fmaf(k.y, k.y, kk));
                qq = fmaf(q.x, q.x, fmaf(q.y, q.y, qq));
            }
            kk = sum_lanes<1, 2>(kk);
            qq = sum_lanes<1, 2>(qq);
        }
        if (part == 0) {
            const bool norm = in_.problem.qk_l2norm;
            shared_.norm_k[r] = norm ? 1.0f / sqrtf(kk + in_.problem.l2norm_eps) : 1.0f;
            shared_.norm_q[r] = in_.problem.scale * (norm ? 1.0f / sqrtf(qq + in_.problem.l2norm_eps) : 1.0f);
        }
    }

    __device__ __forceinline__ void multiply_rows() {
#pragma unroll
        for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) kk_[n][j] = qk_[n][j] = 0.0f;
#pragma unroll 2
        for (int k = 0; k < Config::kK; k += 16) {
            const Fragment<Op> rows_k = shared_.k.a(16 * warp(), k), rows_q = shared_.q.a(16 * warp(), k);
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
                if (b > warp()) continue;
                const Fragment<Op> columns = shared_.k.b_transposed(16 * b, k);
                multiply(kk_[2 * b], kk_[2 * b + 1], rows_k, columns);
                multiply(qk_[2 * b], qk_[2 * b + 1], rows_q, columns);
            }
        }
    }

    // ---------------------------------------------------------------------------------------------------- gates

    // This warp fills its slot and the factors of one value head.
    __device__ __forceinline__ void fill_gates(std::int32_t head) {
        constexpr int kEach = kChunk / 32;  // tokens of a lane, neighbours
        const HeadGate gate(in_, head);
        double sum[kEach];
        float beta[kEach];
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            const int i = kEach * lane() + j;
            float g = 0.0f;
            beta[j] = 0.0f;
            if (i < chunk_.tokens) {
                const std::int64_t t = chunk_.begin + i;
                if (in_.g) {
                    g = gate.log_decay(in_, load_bits(in_.g.data, in_.g.dtype, in_.g.offset(chunk_.batch, t, head)));
                }
                beta[j] = beta_of(
                    in_,
                    in_.beta ? load_bits(in_.beta.data, in_.beta.dtype, in_.beta.offset(chunk_.batch, t, head)) : 0);
            }
            sum[j] = (j > 0 ? sum[j - 1] : 0.0) + static_cast<double>(g);
        }
        const double before = warp_prefix(sum[kEach - 1]) - sum[kEach - 1];
        const double end = __shfl_sync(kFullWarp, before + sum[kEach - 1], 31);
        typename Config::Record& to = record(head);
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            const int i = kEach * lane() + j;
            const double gamma = before + sum[j];
            const float high = static_cast<float>(gamma), low = static_cast<float>(gamma - high);
            const float from_start = expf(static_cast<float>(gamma)), to_end = expf(static_cast<float>(end - gamma));
            const bool inside = i < chunk_.tokens;
            const float norm_k = shared_.norm_k[i], norm_q = shared_.norm_q[i];
            shared_.high[warp()][i] = high;
            shared_.low[warp()][i] = low;
            shared_.beta[warp()][i] = beta[j];
            to.beta[i] = beta[j];
            to.read[i] = inside ? beta[j] * from_start * norm_k : 0.0f;
            to.query[i] = inside ? from_start * norm_q : 0.0f;
            to.keep[i] = to_end * norm_k;
            to.high[i] = high;
            to.low[i] = low;
            to.norm_k[i] = norm_k;
            to.norm_q[i] = norm_q;
        }
        if (lane() == 0) to.total = expf(static_cast<float>(end));
    }

    // The sum over this lane and those before it.
    static __device__ __forceinline__ double warp_prefix(double x) {
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const double other = __shfl_up_sync(kFullWarp, x, step);
            if (lane() >= step) x += other;
        }
        return x;
    }

    // ------------------------------------------------------------------------------------------------- triangles

    // This warp's rows of L and P. Above the diagonal the exponent would be positive: selected to be zero.
    __device__ __forceinline__ void form_triangles(int slot) {
        float high[2], low[2], factor_l[2], factor_p[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = row(half);
            high[half] = shared_.high[slot][i];
            low[half] = shared_.low[slot][i];
            factor_l[half] = shared_.beta[slot][i] * shared_.norm_k[i];
            factor_p[half] = shared_.norm_q[i];
        }
#pragma unroll
        for (int n = 0; n < 2 * kBlocks; ++n) {
            if (n / 2 > warp()) continue;
            const int j0 = 8 * n + column();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = row(half);
                float l[2], p[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int j = j0 + e;
                    const float between =
                        __expf((high[half] - shared_.high[slot][j]) + (low[half] - shared_.low[slot][j]));
                    const float both = between * shared_.norm_k[j];
                    l[e] = i > j ? factor_l[half] * both * kk_[n][2 * half + e] : 0.0f;
                    p[e] = i >= j ? factor_p[half] * both * qk_[n][2 * half + e] : 0.0f;
                }
                shared_.attention.set(i, j0, Pair<Op>::of(p[0], p[1]));
                if (n / 2 < warp()) {
                    shared_.lower.set(i, j0, Pair<Exact>::of(l[0], l[1]));
                } else {
                    shared_.diagonal[warp()][i % 16][j0 % 16] = l[0];
                    shared_.diagonal[warp()][i % 16][j0 % 16 + 1] = l[1];
                }
            }
        }
    }

    // D = (I + L_ww)^-1 into the diagonal block of `lower`, a column a lane; the upper lanes store the second part.
    __device__ __forceinline__ void invert_diagonal() {
        const int c = lane() % 16, part = lane() / 16;
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float sum = i == c ? 1.0f : 0.0f;
#pragma unroll
            for (int j = 0; j < i; j += 4) {
                const float4 l = *reinterpret_cast<const float4*>(&shared_.diagonal[warp()][i][j]);
                sum = fmaf(-l.x, x[j], sum);
                if (j + 1 < i) sum = fmaf(-l.y, x[j + 1], sum);
                if (j + 2 < i) sum = fmaf(-l.z, x[j + 2], sum);
                if (j + 3 < i) sum = fmaf(-l.w, x[j + 3], sum);
            }
            x[i] = sum;
        }
        auto* to = shared_.lower.x + part * shared_.lower.kPart;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const __nv_bfloat16 first = from_float<__nv_bfloat16>(x[i]);
            to[shared_.lower.at(16 * warp() + i, 16 * warp() + c)] =
                part == 0 ? first : from_float<__nv_bfloat16>(x[i] - to_float(first));
        }
    }

    // Columns 16 w .. 16 w + 15 of the inverse, transposed: solved_[b] is T_bw^T as an A fragment.
    __device__ __forceinline__ void solve_columns() {
        const int w = warp();
        Fragment<Exact> solved[kBlocks];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            if (b < w) continue;
            if (b == w) {
                solved[b] = shared_.lower.a_transposed(b, w);
                copy_diagonal();
                continue;
            }
            float sum[2][4] = {}, product[2][4] = {};
#pragma unroll
            for (int j = 0; j < b; ++j) {
                if (j >= w) multiply(sum[0], sum[1], solved[j], shared_.lower.b_transposed(b, j));
            }
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[n][e] = -sum[n][e];
            multiply(product[0], product[1], Fragment<Exact>::of(sum[0], sum[1]), shared_.lower.b_transposed(b, b));
            solved[b] = Fragment<Exact>::of(product[0], product[1]);
            // The product's rows are columns of T: transposed back on the way to shared memory.
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    auto pair = Pair<TwoParts<Op>>::of(product[n][2 * half], product[n][2 * half + 1]);
#pragma unroll
                    for (int part = 0; part < 2; ++part) pair.part[part] = transpose_8x8(pair.part[part]);
                    shared_.inverse.set(16 * b + 8 * n + lane() / 4, 16 * w + 8 * half + column(), pair);
                }
        }
    }

    __device__ __forceinline__ void copy_diagonal() {
#pragma unroll
        for (int block = 0; block < 4; ++block) {
            const int i = row(block % 2), j = 16 * warp() + column() + block / 2 * 8;
            const float2 x = shared_.lower.get(i, j).value();
            shared_.inverse.set(i, j, Pair<TwoParts<Op>>::of(x.x, x.y));
        }
    }

    __device__ __forceinline__ typename Config::Record& record(std::int32_t head) const {
        return static_cast<typename Config::Record*>(params_.to)[number_ * in_.problem.heads_v + head];
    }

    __device__ __forceinline__ void store(std::int32_t head) {
        typename Config::Record& to = record(head);
        copy(to.inverse, shared_.inverse);
        copy(to.attention, shared_.attention);
    }

    template <class Triangle>
    static __device__ __forceinline__ void copy(typename Op::Element* to, const Triangle& from) {
        for (int i = static_cast<int>(threadIdx.x); i < Triangle::kElements / 8; i += Config::kThreads) {
            reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from.x)[i];
        }
    }

    const PrepareParams& params_;
    const Inputs& in_;
    PrepareShared<Config>& shared_;
    const Chunk chunk_;
    const std::int64_t number_;
    const std::int32_t key_head_;
    float kk_[2 * kBlocks][4], qk_[2 * kBlocks][4];  // 16 rows of K K^T and Q K^T
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    prepare_kernel(const __grid_constant__ PrepareParams params) {
    auto& shared = shared_block<PrepareShared<Config>>();
    const auto key_heads = static_cast<std::uint32_t>(params.in.problem.heads_k);
    const auto shares = static_cast<std::uint32_t>(pieces(params.in.group(), params.share));
    const std::uint32_t share = blockIdx.x % shares, key_head = blockIdx.x / shares % key_heads;
    const std::int64_t number = blockIdx.x / shares / key_heads;
    const Chunk chunk = chunk_of(params.in, params.table, number);
    if (chunk.tokens == 0) return;
    ChunkPreparation<Config>(params, shared, chunk, number, static_cast<std::int32_t>(key_head))
        .run(static_cast<std::int32_t>(share) * params.share);
}

}  // namespace flashqla::cuda::sm80
