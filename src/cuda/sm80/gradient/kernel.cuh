// One block takes one chunk of a key head through all value heads that read it, tile by tile of V:
//
//   dQ^ += query (dO S^T)                     [C,K]
//   dK^ += keep (X D^T) - read (W' S^T)       [C,K]
//   P'  += dO X^T,  -L' += W' X^T             [C,C]   16x16 blocks on and below the diagonal
//
// Gamma o P' and Z are added up over the value heads as well and multiplied with the rows of k and q once, at the end:
//
//   dQ^ += (Gamma o P') K^,   dK^ += (Gamma o P')^T Q^ + (Z + Z^T) K^
//
// Norms and scale: dQ and dK are kept times the row's own factor (scale n_q, n_k), so that the triangles carry both of
// their factors and the rows of k and q are operands as they came.
//
// U is never formed: <W'_i, U_i> = <k^_i, (W' S^T)_i>, and so for the other inner products that gates and beta need.
#pragma once

#include "cuda/device/chunks.cuh"
#include "cuda/device/gates.cuh"
#include "cuda/device/grid_order.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/sm80/gradient/config.cuh"
#include "cuda/sm80/gradient/gates.cuh"

namespace flashqla::cuda::sm80 {

template <class Config>
class ChunkGradient {
    using Op = typename Config::Op;
    using Element = typename Op::Element;
    using Shared = GradientShared<Config>;
    using Stage = GradientStage<Config>;
    static constexpr int kChunk = Config::kChunk, kBlocks = Config::kBlocks, kK = Config::kK;
    static constexpr int kColumns = Config::kColumns, kThreads = Config::kThreads;
    static constexpr int kSlots = Config::kSlots, kWidth = Config::kWidth;

public:
    __device__ __forceinline__ ChunkGradient(const GradientParams& params, Shared& shared, const Chunk& chunk,
                                             std::int64_t number, std::int32_t key_head)
        : params_(params),
          call_(params.call),
          p_(params.call.problem),
          shared_(shared),
          chunk_(chunk),
          number_(number),
          key_head_(key_head),
          tiles_((p_.dim_v + kColumns - 1) / kColumns) {}

    __device__ __forceinline__ void run() {
        const std::int32_t items = call_.group() * tiles_;
        const bool ahead = params_.stages == 2;
        fill_tokens<kThreads>(shared_.k, rows_of(call_.k, key_head_, 0, p_.dim_k));
        fill_tokens<kThreads>(shared_.q, rows_of(call_.q, key_head_, 0, p_.dim_k));
        load(0);
        zero(d_q_);
        zero(d_k_);
        zero(raw_);
        clear_sums();
        for (std::int32_t item = 0; item < items; ++item) {
            if (ahead && item + 1 < items) {
                load(item + 1);
                copies_wait<1>();
            } else {
                copies_wait<0>();
            }
            __syncthreads();
            const std::int32_t i = item / tiles_, tile = item % tiles_;
            const Stage& s = stage(item);
            add_products(s, shared_.factors[i % 2]);
            add_triangles(s);
            const bool last = tile == tiles_ - 1;
            if (last) {
                finish_triangles(shared_.factors[i % 2]);
                hand_over_sums();
                __syncthreads();
                store_tokens(call_.value_head(key_head_, i), shared_.factors[i % 2]);
            }
            __syncthreads();
            if (!ahead && item + 1 < items) load(item + 1);
        }
        add_triangle_products();
        if (p_.qk_l2norm) undo_norms();
        store(call_.d_q, d_q_);
        store(call_.d_k, d_k_);
    }

private:
    static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x / 32); }
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
    // The lane's columns of an accumulator: this one and the next of each 8.
    static __device__ __forceinline__ int column() { return 2 * (lane() % 4); }

    // The warp's part of dQ and dK: rows row(0), row(1) of a lane, keys from first_key() on.
    static __device__ __forceinline__ int row_block() { return warp() % kBlocks; }
    static __device__ __forceinline__ int side() { return warp() / kBlocks; }
    static __device__ __forceinline__ int row(int half) { return 16 * row_block() + lane() / 4 + 8 * half; }
    static __device__ __forceinline__ int first_key() { return kWidth * side(); }

    // The warp's triangle (0: P', 1: L') and the blocks it has of it.
    static __device__ __forceinline__ int triangle() { return warp() / Config::kSharers; }
    static __device__ __forceinline__ int block_of(int slot) {
        return warp() % Config::kSharers + Config::kSharers * slot;
    }
    static __device__ __forceinline__ int block_row(int block) { return (block >= 1) + (block >= 3) + (block >= 6); }
    static __device__ __forceinline__ int block_column(int block) {
        return block - block_row(block) * (block_row(block) + 1) / 2;
    }

    template <int kCount>
    static __device__ __forceinline__ void zero(float (&x)[kCount][4]) {
#pragma unroll
        for (int n = 0; n < kCount; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[n][e] = 0.0f;
    }

    // ------------------------------------------------------------------------------------------------- loads

    __device__ __forceinline__ TokenRows rows_of(const TokenRef& x, std::int32_t head, int skip, int columns) const {
        return TokenRows::of(x, chunk_.batch, chunk_.begin, head, skip, chunk_.tokens, columns);
    }

    __device__ __forceinline__ Stage& stage(std::int32_t item) const {
        return (&shared_.first_stage)[params_.stages == 2 ? item % 2 : 0];
    }

    __device__ __forceinline__ void load(std::int32_t item) {
        const std::int32_t i = item / tiles_, tile = item % tiles_;
        const std::int32_t head = call_.value_head(key_head_, i);
        const int v0 = tile * kColumns;
        const std::int64_t at = number_ * p_.heads_v + head, padded = padded_columns(p_.dim_v);
        Stage& to = stage(item);
        const auto operands = [&](auto& tile_of, const void* from, int columns) {
            fill_blocked<kThreads>(tile_of,
                                   static_cast<const Element*>(from) + (at * Op::kParts * padded + v0) * columns,
                                   padded * columns);
        };
        operands(to.state, params_.history, kK);
        operands(to.adjoint, params_.adjoints, kK);
        operands(to.deltas, params_.deltas, kChunk);
        operands(to.residuals, params_.residuals, kChunk);
        fill_tokens<kThreads>(to.d_o, rows_of(call_.d_o, head, v0, p_.dim_v - v0));
        fill_tokens<kThreads>(to.v, rows_of(call_.v, head, v0, p_.dim_v - v0));
        if (tile == 0) {
            using Record = PreparedChunk<Element, Op::kParts, kChunk>;
            const Record* from = static_cast<const Record*>(params_.prepared) + at;
            RowFactors<kChunk>& f = shared_.factors[i % 2];
            copy_record<kThreads, sizeof(float) * (4 * kChunk + 4)>(f.beta, from->beta);
            copy_record<kThreads, sizeof(float) * 4 * kChunk>(f.high, from->high);
        }
        copies_commit();
    }

    // ---------------------------------------------------------------------------------------------- products

    // A block of Q K^T or K K^T: what the gates' exponents multiply. Once a head, since there is no place to keep it.
    __device__ __forceinline__ void multiply_rows(float (&gram)[2][4], int block) const {
        const auto& left = triangle() == 0 ? shared_.q : shared_.k;
        zero(gram);
#pragma unroll 4
        for (int k = 0; k < kK; k += 16) {
            multiply(gram[0], gram[1], left.a(16 * block_row(block), k),
                     shared_.k.b_transposed(16 * block_column(block), k));
        }
    }

    static __device__ __forceinline__ float dot(const Fragment<Op>& a, const Fragment<Op>& b, float sum) {
#pragma unroll
        for (int block = 0; block < 4; ++block) {
            const float2 x = a.pair(block).value(), y = b.pair(block).value();
            sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
        }
        return sum;
    }

    __device__ __forceinline__ void add_products(const Stage& s, const RowFactors<kChunk>& f) {
        add_state_products(s, f);
        add_adjoint_products(s, f);
    }

    __device__ __forceinline__ void add_state_products(const Stage& s, const RowFactors<kChunk>& f) {
        float out[kWidth / 8][4] = {}, read[kWidth / 8][4] = {};
#pragma unroll 2
        for (int v = 0; v < kColumns; v += 16) {
            const Fragment<Op> d_o = s.d_o.a(16 * row_block(), v), w = s.residuals.a_transposed(v, 16 * row_block());
#pragma unroll
            for (int n = 0; n < kWidth / 8; n += 2) {
                const Fragment<Op> state = s.state.b(v, first_key() + 8 * n);
                multiply(out[n], out[n + 1], d_o, state);
                multiply(read[n], read[n + 1], w, state);
            }
            if (v / 16 % Config::kSides == side()) add_value_dots(w, s.v.a(16 * row_block(), v));
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float query = f.query[row(half)], reads = f.read[row(half)];
#pragma unroll
            for (int n = 0; n < kWidth / 8; ++n) {
                const float2 k = shared_.k.get(row(half), first_key() + 8 * n + column()).value();
                const float2 q = shared_.q.get(row(half), first_key() + 8 * n + column()).value();
                const float *o = &out[n][2 * half], *w = &read[n][2 * half];
                query_dot_[half] = fmaf(q.x, o[0], fmaf(q.y, o[1], query_dot_[half]));
                read_dot_[half] = fmaf(k.x, w[0], fmaf(k.y, w[1], read_dot_[half]));
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    d_q_[n][2 * half + e] = fmaf(query, o[e], d_q_[n][2 * half + e]);
                    d_k_[n][2 * half + e] = fmaf(-reads, w[e], d_k_[n][2 * half + e]);
                }
            }
        }
    }

    __device__ __forceinline__ void add_adjoint_products(const Stage& s, const RowFactors<kChunk>& f) {
        float kept[kWidth / 8][4] = {};
#pragma unroll 2
        for (int v = 0; v < kColumns; v += 16) {
            const Fragment<Op> x = s.deltas.a_transposed(v, 16 * row_block());
#pragma unroll
            for (int n = 0; n < kWidth / 8; n += 2) {
                const Fragment<Op> adjoint = s.adjoint.b(v, first_key() + 8 * n);
                multiply(kept[n], kept[n + 1], x, adjoint);
                if (v / 16 % kBlocks == row_block()) along_ = dot(s.state.b(v, first_key() + 8 * n), adjoint, along_);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float keep = f.keep[row(half)];
#pragma unroll
            for (int n = 0; n < kWidth / 8; ++n) {
                const float2 k = shared_.k.get(row(half), first_key() + 8 * n + column()).value();
                const float* x = &kept[n][2 * half];
                keep_dot_[half] = fmaf(k.x, x[0], fmaf(k.y, x[1], keep_dot_[half]));
#pragma unroll
                for (int e = 0; e < 2; ++e) d_k_[n][2 * half + e] = fmaf(keep, x[e], d_k_[n][2 * half + e]);
            }
        }
    }

    // Fragments of the same rows and columns of W' and v.
    __device__ __forceinline__ void add_value_dots(const Fragment<Op>& w, const Fragment<Op>& v) {
#pragma unroll
        for (int block = 0; block < 4; ++block) {
            const float2 x = w.pair(block).value(), y = v.pair(block).value();
            value_dot_[block % 2] = fmaf(x.x, y.x, fmaf(x.y, y.y, value_dot_[block % 2]));
        }
    }

    __device__ __forceinline__ void add_triangles(const Stage& s) {
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            const int block = block_of(slot);
            if (block >= Config::kTriangle) continue;
            const int i = 16 * block_row(block), j = 16 * block_column(block);
#pragma unroll
            for (int v = 0; v < kColumns; v += 16) {
                const Fragment<Op> left = triangle() == 0 ? s.d_o.a(i, v) : s.residuals.a_transposed(v, i);
                multiply(raw_[2 * slot], raw_[2 * slot + 1], left, s.deltas.b(v, j));
            }
        }
    }

    // ------------------------------------------------------------------------------------------ end of a head

    // Adds the head's Gamma o P' or Z, norms and scale included, and takes the sums of its H over rows and columns. The
    // diagonal of H is left out: it would be subtracted from itself.
    __device__ __forceinline__ void finish_triangles(const RowFactors<kChunk>& f) {
        const bool outputs = triangle() == 0;
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            const int block = block_of(slot);
            if (block >= Config::kTriangle) continue;
            float rows[2] = {}, columns[2][2] = {}, gram[2][4], sum[2][4];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                load_block(sum[n], shared_.sums[triangle()][block][n]);
            }
            multiply_rows(gram, block);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = 16 * block_row(block) + lane() / 4 + 8 * half;
                const float high = f.high[i], low = f.low[i];
                const float left = outputs ? f.norm_q[i] : -f.norm_k[i], beta = outputs ? 1.0f : f.beta[i];
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int j = 16 * block_column(block) + 8 * n + column() + e;
                        const float between = __expf((high - f.high[j]) + (low - f.low[j]));
                        const int at = 2 * half + e;
                        const float x = left * f.norm_k[j] * between * raw_[2 * slot + n][at];
                        const float h = i > j ? x * gram[n][at] : 0.0f;
                        sum[n][at] += i > j || (outputs && i == j) ? beta * x : 0.0f;
                        rows[half] += h;
                        columns[n][e] = fmaf(beta, h, columns[n][e]);
                    }
                rows[half] = sum_lanes<1, 4>(rows[half]);
                if (lane() % 4 == 0) shared_.rows[triangle()][block][lane() / 4 + 8 * half] = rows[half];
            }
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float below = sum_lanes<4, 32>(columns[n][e]);
                    if (lane() < 4) shared_.columns[triangle()][block][8 * n + column() + e] = below;
                }
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                shared_.sums[triangle()][block][n][lane()] = {sum[n][0], sum[n][1], sum[n][2], sum[n][3]};
            }
        }
        zero(raw_);
    }

    __device__ __forceinline__ void clear_sums() {
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            const int block = block_of(slot);
            if (block >= Config::kTriangle) continue;
#pragma unroll
            for (int n = 0; n < 2; ++n) shared_.sums[triangle()][block][n][lane()] = {0.0f, 0.0f, 0.0f, 0.0f};
        }
    }

    // A lane's accumulators of a block.
    static __device__ __forceinline__ void load_block(float (&to)[4], const float4 (&from)[32]) {
        const float4 four = from[lane()];
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    }

    __device__ __forceinline__ void hand_over_sums() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            hand_over(query_dot_[half], shared_.query_dots, half);
            hand_over(read_dot_[half], shared_.read_dots, half);
            hand_over(keep_dot_[half], shared_.keep_dots, half);
            hand_over(value_dot_[half], shared_.value_dots, half);
        }
        along_ = warp_sum(along_);
        if (lane() == 0) shared_.along[warp()] = along_;
        along_ = 0.0f;
    }

    __device__ __forceinline__ void hand_over(float& x, float (&to)[Config::kSides][kChunk], int half) {
        x = sum_lanes<1, 4>(x);
        if (lane() % 4 == 0) to[side()][row(half)] = x;
        x = 0.0f;
    }

    __device__ __forceinline__ void store_tokens(std::int32_t head, const RowFactors<kChunk>& f) const {
        const int i = static_cast<int>(threadIdx.x);
        if (i >= chunk_.tokens) return;
        params_.tokens[(number_ * p_.heads_v + head) * kChunk + i] =
            gradient_of_token(shared_, f, i, i + 1 == chunk_.tokens);
    }

    // ------------------------------------------------------------------------------------------ end of the chunk

    __device__ __forceinline__ void add_triangle_products() {
        auto &weight = shared_.triangles.weight, &z = shared_.triangles.z;
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            const int block = block_of(slot);
            if (block >= Config::kTriangle) continue;
            auto& to = triangle() == 0 ? weight : z;
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                float sum[4];
                load_block(sum, shared_.sums[triangle()][block][n]);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float2 x = {sum[2 * half], sum[2 * half + 1]};
#pragma unroll
                    for (int term = 0; term < Shared::kTerms; ++term) {
                        const Pair<Op> pair = Pair<Op>::of(x.x, x.y);
                        to[term].set(16 * block_row(block) + lane() / 4 + 8 * half,
                                     16 * block_column(block) + 8 * n + column(), pair);
                        const float2 rounded = pair.value();
                        x.x -= rounded.x, x.y -= rounded.y;
                    }
                }
            }
        }
        __syncthreads();
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int term = 0; term < Shared::kTerms; ++term) {
                if (b <= row_block()) {
                    const Fragment<Op> by_weight = weight[term].a(row_block(), b), by_z = z[term].a(row_block(), b);
#pragma unroll
                    for (int n = 0; n < kWidth / 8; n += 2) {
                        const Fragment<Op> k = shared_.k.b(16 * b, first_key() + 8 * n);
                        multiply(d_q_[n], d_q_[n + 1], by_weight, k);
                        multiply(d_k_[n], d_k_[n + 1], by_z, k);
                    }
                }
                if (b >= row_block()) {
                    const Fragment<Op> by_weight = weight[term].a_transposed(b, row_block()),
                                       by_z = z[term].a_transposed(b, row_block());
#pragma unroll
                    for (int n = 0; n < kWidth / 8; n += 2) {
                        multiply(d_k_[n], d_k_[n + 1], by_weight, shared_.q.b(16 * b, first_key() + 8 * n));
                        multiply(d_k_[n], d_k_[n + 1], by_z, shared_.k.b(16 * b, first_key() + 8 * n));
                    }
                }
            }
    }

    // q' = dQ - n_q^2 q <q, dQ>, and the same for k; the factor of the row itself is in dQ already.
    __device__ __forceinline__ void undo_norms() {
        float along_q[2], along_k[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            along_q[half] = along_k[half] = 0.0f;
#pragma unroll
            for (int n = 0; n < kWidth / 8; ++n) {
                const float2 q = shared_.q.get(row(half), first_key() + 8 * n + column()).value();
                const float2 k = shared_.k.get(row(half), first_key() + 8 * n + column()).value();
                along_q[half] = fmaf(q.x, d_q_[n][2 * half], fmaf(q.y, d_q_[n][2 * half + 1], along_q[half]));
                along_k[half] = fmaf(k.x, d_k_[n][2 * half], fmaf(k.y, d_k_[n][2 * half + 1], along_k[half]));
            }
            hand_over(along_q[half], shared_.query_dots, half);
            hand_over(along_k[half], shared_.keep_dots, half);
        }
        __syncthreads();
        const RowFactors<kChunk>& f = shared_.factors[0];  // norms are those of any head
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = row(half);
            float to_q = 0.0f, to_k = 0.0f;
#pragma unroll
            for (int s = 0; s < Config::kSides; ++s) to_q += shared_.query_dots[s][i], to_k += shared_.keep_dots[s][i];
            const float norm_q = f.norm_q[i] / p_.scale, norm_k = f.norm_k[i];
            to_q *= norm_q * norm_q, to_k *= norm_k * norm_k;
#pragma unroll
            for (int n = 0; n < kWidth / 8; ++n) {
                const float2 q = shared_.q.get(i, first_key() + 8 * n + column()).value();
                const float2 k = shared_.k.get(i, first_key() + 8 * n + column()).value();
                d_q_[n][2 * half] = fmaf(-to_q, q.x, d_q_[n][2 * half]);
                d_q_[n][2 * half + 1] = fmaf(-to_q, q.y, d_q_[n][2 * half + 1]);
                d_k_[n][2 * half] = fmaf(-to_k, k.x, d_k_[n][2 * half]);
                d_k_[n][2 * half + 1] = fmaf(-to_k, k.y, d_k_[n][2 * half + 1]);
            }
        }
    }

    __device__ __forceinline__ void store(const TokenRef& to, const float (&x)[kWidth / 8][4]) const {
        if (!to) return;
        const std::int64_t stride = only_here(to.token);
        const std::int64_t at = to.offset(chunk_.batch, chunk_.begin, key_head_) + first_key() + column();
        with_type(to.dtype, to.data, [&]<class T>(T* data) {
            const bool pairs = stride % 2 == 0 && p_.dim_k % 2 == 0 &&
                               reinterpret_cast<std::uintptr_t>(data + at) % (2 * sizeof(T)) == 0;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (row(half) >= chunk_.tokens) continue;
                T* line = data + at + row(half) * stride;
#pragma unroll
                for (int n = 0; n < kWidth / 8; ++n) {
                    const int left = p_.dim_k - first_key() - 8 * n - column();
                    const float two[2] = {x[n][2 * half], x[n][2 * half + 1]};
                    if (pairs && left > 0) {
                        store_two(line + 8 * n, two);
                    } else {
                        if (left > 0) line[8 * n] = from_float<T>(two[0]);
                        if (left > 1) line[8 * n + 1] = from_float<T>(two[1]);
                    }
                }
            }
        });
    }

    template <class T>
    static __device__ __forceinline__ void store_two(T* to, const float (&x)[2]) {
        struct alignas(2 * sizeof(T)) Two {
            T x[2];
        };
        *reinterpret_cast<Two*>(to) = Two{{from_float<T>(x[0]), from_float<T>(x[1])}};
    }

    const GradientParams& params_;
    const BackwardCall& call_;
    const Problem& p_;
    Shared& shared_;
    const Chunk chunk_;
    const std::int64_t number_;
    const std::int32_t key_head_;
    const std::int32_t tiles_;

    float d_q_[kWidth / 8][4], d_k_[kWidth / 8][4];
    float raw_[2 * kSlots][4];  // this head's P' or L'
    float query_dot_[2] = {}, read_dot_[2] = {}, keep_dot_[2] = {}, value_dot_[2] = {}, along_ = 0.0f;
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) gradient_kernel(const __grid_constant__ GradientParams params) {
    wait_for_earlier_grids();
    const auto heads = static_cast<std::uint32_t>(params.call.problem.heads_k);
    const std::int64_t number = blockIdx.x / heads;
    const Chunk chunk = chunk_of(params.call, params.table, number);
    if (chunk.tokens == 0) return;
    ChunkGradient<Config>(params, shared_block<GradientShared<Config>>(), chunk, number,
                          static_cast<std::int32_t>(blockIdx.x % heads))
        .run();
}

}  // namespace flashqla::cuda::sm80
