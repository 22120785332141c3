// One block prepares one chunk of one key head for the value heads that read it, or a share of them.
//
//   KK = K K^T, QK = Q K^T       once, all warps
//   for each value head:  L = stril(beta Gamma o K^ K^^T),  T = (I + L)^-1     one warp
//                         P = tril(Gamma o Q^ K^^T)                            one warp, or the same one afterwards
#pragma once

#include "cuda/device/grid_order.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/sm80/prepare/factors.cuh"
#include "cuda/sm80/prepare/triangles.cuh"

namespace flashqla::cuda::sm80 {

template <class Config>
class ChunkPreparation {
    using Op = typename Config::Op;
    using Record = typename Config::Record;
    static constexpr int kChunk = Config::kChunk, kBlocks = Config::kBlocks, kWarps = Config::kWarps;
    // Block rows kBlocks - 1 - i and i of one product are a job; all jobs are equally long.
    static constexpr int kPairs = kBlocks / 2, kJobs = 2 * kPairs, kJobsEach = (kJobs + kWarps - 1) / kWarps;

public:
    __device__ __forceinline__ ChunkPreparation(const PrepareParams& params, PrepareShared<Config>& shared,
                                                const Chunk& chunk, std::int64_t number, std::int32_t key_head)
        : in_(params.in), shared_(shared), chunk_(chunk), to_(params.to), number_(number), key_head_(key_head) {}

    // For `heads` value heads of the group from number `begin` on.
    __device__ __forceinline__ void run(std::int32_t begin, int heads) {
        // A warp has the gates of one head; it begins while the rows are on their way.
        const bool has_head = warp() < heads;
        HeadFactors<kChunk>& factors = shared_.heads[warp() % Config::kHeads];
        HeadGates<Config> gates;
        const std::int32_t head = in_.value_head(key_head_, begin + warp());
        if (has_head) gates.load(in_, chunk_, head);
        load_rows();
        if (threadIdx.x == 0) shared_.head_count = heads;
        if (has_head) {
            if (lane() == 0) factors.record = number_ * in_.problem.heads_v + head;
            __syncwarp();
            gates.begin(in_, chunk_.tokens, head, factors, record(factors));
        }
        multiply_rows();
        if (has_head) {
            gates.finish(chunk_.tokens, shared_.norm_k, shared_.norm_q, factors, record(factors));
        }
        __syncthreads();
        halves_of_heads();
    }

private:
    static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x / 32); }
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }

    // ------------------------------------------------------------------------------------------- rows, products

    __device__ __forceinline__ void load_rows() {
        using Input = typename Op::Input;
        const auto rows_of = [&](const TokenRef& x) {
            const auto* data = static_cast<const Input*>(x.data) + x.offset(chunk_.batch, chunk_.begin, key_head_);
            return GlobalRows<Input>{data, x.token, chunk_.tokens, in_.problem.dim_k};
        };
        fill<Config::kThreads>(shared_.rows.k, rows_of(in_.k));
        fill<Config::kThreads>(shared_.rows.q, rows_of(in_.q));
        copies_commit();
        const int i = static_cast<int>(threadIdx.x);
        if (!in_.problem.qk_l2norm && i < kChunk) {
            shared_.norm_k[i] = i < chunk_.tokens ? 1.0f : 0.0f;
            shared_.norm_q[i] = i < chunk_.tokens ? in_.problem.scale : 0.0f;
        }
    }

    __device__ __forceinline__ void multiply_rows() {
        copies_wait<0>();
        __syncthreads();
        RowJob jobs[kJobsEach];
#pragma unroll
        for (int i = 0; i < kJobsEach; ++i) {
            if (warp() + i * kWarps < kJobs) multiply_job(jobs[i], warp() + i * kWarps);
        }
        __syncthreads();  // everyone is done with the rows
#pragma unroll
        for (int i = 0; i < kJobsEach; ++i) {
            if (warp() + i * kWarps < kJobs) store_job(jobs[i], warp() + i * kWarps);
        }
        if (!in_.problem.qk_l2norm) return;
        for (int i = static_cast<int>(threadIdx.x); i < 2 * kChunk; i += Config::kThreads) {
            const bool of_q = i >= kChunk;
            float& x = of_q ? shared_.norm_q[i - kChunk] : shared_.norm_k[i];
            const bool inside = i % kChunk < chunk_.tokens;
            x = inside ? (of_q ? in_.problem.scale : 1.0f) / sqrtf(x + in_.problem.l2norm_eps) : 0.0f;
        }
        __syncthreads();
    }

    // Two block rows of a product, and the squares of rows of q.
    struct RowJob {
        float upper[kPairs][2][4], under[kBlocks][2][4];
        float squares[2][2][4];
    };
    static __device__ __forceinline__ bool job_of_q(int job) { return job >= kPairs; }
    static __device__ __forceinline__ int upper_row(int job) { return job % kPairs; }
    static __device__ __forceinline__ int under_row(int job) { return kBlocks - 1 - job % kPairs; }

    template <int kCount>
    static __device__ __forceinline__ void clear(float (&x)[kCount][2][4]) {
#pragma unroll
        for (int b = 0; b < kCount; ++b)
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) x[b][n][e] = 0.0f;
    }

    __device__ __forceinline__ void multiply_job(RowJob& x, int job) {
        clear(x.upper), clear(x.under), clear(x.squares);
        const auto& rows = job_of_q(job) ? shared_.rows.q : shared_.rows.k;
        const bool squares = job_of_q(job) && in_.problem.qk_l2norm;
        const int upper = upper_row(job), under = under_row(job);
#pragma unroll 2
        for (int k = 0; k < Config::kK; k += 16) {
            const Fragment<Op> a = rows.a(16 * upper, k), c = rows.a(16 * under, k);
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
                if (b > under) continue;
                const Fragment<Op> columns = shared_.rows.k.b_transposed(16 * b, k);
                multiply(x.under[b][0], x.under[b][1], c, columns);
                if (b < kPairs && b <= upper) multiply(x.upper[b][0], x.upper[b][1], a, columns);
            }
            if (squares) {
                multiply(x.squares[0][0], x.squares[0][1], a, turned(a));
                multiply(x.squares[1][0], x.squares[1][1], c, turned(c));
            }
        }
        if (!in_.problem.qk_l2norm) return;
        if (job_of_q(job)) {
            store_squares(shared_.norm_q, upper, x.squares[0]);
            store_squares(shared_.norm_q, under, x.squares[1]);
            return;
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            if (b < kPairs && b == upper) store_squares(shared_.norm_k, b, x.upper[b]);
            if (b == under) store_squares(shared_.norm_k, b, x.under[b]);
        }
    }

    // The diagonal of a block of squares: each element is in one lane of its row.
    static __device__ __forceinline__ void store_squares(float* to, int block, const float (&x)[2][4]) {
        if (lane() / 8 != lane() % 4) return;
        const bool odd = lane() / 4 % 2 != 0;
        const int i = 16 * block + lane() / 4;
        to[i] = odd ? x[0][1] : x[0][0];
        to[i + 8] = odd ? x[1][3] : x[1][2];
    }

    __device__ __forceinline__ void store_job(const RowJob& x, int job) {
        auto& to = job_of_q(job) ? shared_.products.qk : shared_.products.kk;
        const int upper = upper_row(job), under = under_row(job);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float(&u)[4] = x.under[b][n];
                if (b <= under) to.at(under, b, n) = make_float4(u[0], u[1], u[2], u[3]);
                if (b < kPairs && b <= upper) {
                    const float(&o)[4] = x.upper[b < kPairs ? b : 0][n];
                    to.at(upper, b, n) = make_float4(o[0], o[1], o[2], o[3]);
                }
            }
    }

    // A warp has one inverse and one triangle at most, and with few heads one of them.
    __device__ __forceinline__ void halves_of_heads() {
        static_assert(Config::kHeads == kWarps && (kWarps & (kWarps - 1)) == 0);
        const int inverse = warp();
        if (inverse < shared_.head_count) {
            const HeadFactors<kChunk>& factors = shared_.heads[inverse];
            HeadTriangles<Config>(factors, shared_.norm_k)
                .inverse(shared_.products.kk, shared_.products.diagonal[warp()], record(factors).inverse);
        }
        const int attention = (warp() - shared_.head_count) & (kWarps - 1);
        if (attention < shared_.head_count) {
            const HeadFactors<kChunk>& factors = shared_.heads[attention];
            HeadTriangles<Config>(factors, shared_.norm_k)
                .attention(shared_.products.qk, shared_.norm_q, record(factors).attention);
        }
    }

    __device__ __forceinline__ Record& record(const HeadFactors<kChunk>& factors) const {
        return static_cast<Record*>(to_)[factors.record];
    }

    const Inputs& in_;
    PrepareShared<Config>& shared_;
    const Chunk chunk_;
    void* const to_;
    const std::int64_t number_;
    const std::int32_t key_head_;
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    prepare_kernel(const __grid_constant__ PrepareParams params) {
    wait_for_earlier_grids();
    auto& shared = shared_block<PrepareShared<Config>>();
    const std::uint32_t of_key_head = params.shares.quotient(blockIdx.x);
    const std::uint32_t share = params.shares.remainder(blockIdx.x, of_key_head);
    const std::uint32_t number = params.key_heads.quotient(of_key_head);
    const std::uint32_t key_head = params.key_heads.remainder(of_key_head, number);
    const Chunk chunk = chunk_of(params.in, params.table, number);
    if (chunk.tokens == 0) return;
    const std::int32_t begin = static_cast<std::int32_t>(share) * params.share;
    ChunkPreparation<Config>(params, shared, chunk, number, static_cast<std::int32_t>(key_head))
        .run(begin, min(params.share, params.group - begin));
}

}  // namespace flashqla::cuda::sm80
