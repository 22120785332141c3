// A block takes a chunk of a key head after the other, through all value heads that read it, with the products of
// src/cuda/sm80/gradient/kernel.cuh on Hopper's matrix units:
//
//   dQ^ += query (dO S^T)                     [C,K]
//   dK^ += keep (X D^T) - read (W' S^T)       [C,K]
//   P'  += dO X^T,  -L' += W' X^T             [C,C]
//   dQ^ += (Gamma o P') K^,   dK^ += (Gamma o P')^T Q^ + (Z + Z^T) K^
//
// What dO multiplies is added up over V in the accumulators; the last line comes once for all heads. A and B of every
// product lie in shared memory, as the workspace or the tensors have them: two warps load tiles of V ahead, and the
// rows of the next chunk, so memory never waits for the ends of heads and chunks; two more add up what gates and beta
// need. The computing warpgroups meet at the end of a chunk alone.
#pragma once

#include "cuda/device/chunks.cuh"
#include "cuda/device/gates.cuh"
#include "cuda/device/grid_order.cuh"
#include "cuda/device/ring.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/token_columns.cuh"
#include "cuda/device/token_tile.cuh"
#include "cuda/sm80/gradient/gates.cuh"
#include "cuda/sm90/gradient/config.cuh"

namespace flashqla::cuda::sm90 {

// The warps that load.
template <class Config>
class GradientLoader {
    using Op = typename Config::Op;
    using Element = typename Op::Element;
    using Tiles = typename GradientStage<Config>::Tiles;
    using Record = PreparedChunk<Element, 1, Config::kChunk>;
    static constexpr int kChunk = Config::kChunk, kColumns = Config::kColumns, kK = Config::kK;
    static constexpr int kThreads = Config::kLoaders;

public:
    __device__ __forceinline__ GradientLoader(const GradientParams& params, GradientShared<Config>& shared)
        : params_(params), call_(params.call), p_(params.call.problem), shared_(shared) {}

    __device__ __forceinline__ void run(std::uint32_t items) {
        const auto heads = static_cast<std::uint32_t>(p_.heads_k);
#pragma unroll 1
        for (std::uint32_t item = blockIdx.x; item < items; item += gridDim.x) {
            const Chunk chunk = chunk_of(call_, params_.table, item / heads);
            if (chunk.tokens == 0) continue;
            GradientItem& place = shared_.items[rows_.stage()];
            shared_.rows_empty[rows_.stage()].wait(rows_.round() ^ 1);
            if (thread() == 0) {
                place = {item / heads, chunk.batch, chunk.begin, chunk.tokens, static_cast<std::int32_t>(item % heads)};
            }
            sync_threads<2, kThreads>();
            load(place);
        }
        shared_.rows_empty[rows_.stage()].wait(rows_.round() ^ 1);
        if (thread() == 0) shared_.items[rows_.stage()].tokens = 0;
        hand_over(shared_.rows_full[rows_.stage()], false);
        if (thread() == 0) shared_.rows_full[rows_.stage()].arrive();
    }

private:
    static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x % kThreads); }

    __device__ __forceinline__ TokenRows rows_of(const GradientItem& item, const TokenRef& x, std::int32_t head,
                                                 int skip, int columns) const {
        return TokenRows::of(x, item.batch, item.begin, head, skip, item.tokens, columns);
    }

    // NOTE: the item stays in shared memory: these warps have few registers.
    __device__ __forceinline__ void load(const GradientItem& item) {
        {
            Barrier& full = shared_.rows_full[rows_.stage()];
            GradientRows<Config>& to = shared_.rows[rows_.stage()];
            if (thread() == 0) full.arrive();
            bool copied = fill_rows(to.q, rows_of(item, call_.q, item.key_head, 0, p_.dim_k));
            copied &= fill_rows(to.k, rows_of(item, call_.k, item.key_head, 0, p_.dim_k));
            hand_over(full, copied);
            ++rows_.n;
        }
#pragma unroll 1
        for (std::int32_t i = 0; i < call_.group(); ++i) {
            const std::int32_t head = call_.value_head(item.key_head, i);
#pragma unroll 1
            for (int v = 0; v < p_.dim_v; v += kColumns) {
                Barrier& full = shared_.full[stage_.stage()];
                Tiles& to = shared_.stages[stage_.stage()].tiles;
                shared_.empty[stage_.stage()].wait(stage_.round() ^ 1);
                if (thread() == 0) copy_workspace(to, full, item.number * p_.heads_v + head, v);
                bool copied = fill_rows(to.d_o, rows_of(item, call_.d_o, head, v, p_.dim_v - v));
                copied &= fill_rows(to.v, rows_of(item, call_.v, head, v, p_.dim_v - v));
                hand_over(full, copied);
                ++stage_.n;
            }
            ++heads_;
        }
    }

    // By one thread: columns v.. of V of a chunk and head. The head's factors come with its first tile.
    __device__ __forceinline__ void copy_workspace(Tiles& to, Barrier& full, std::int64_t at, int v) {
        const std::int64_t row = at * padded_columns(p_.dim_v) + v;
        const bool first = v == 0;
        constexpr std::uint32_t kFirst = sizeof(float) * (4 * kChunk + 4), kSecond = sizeof(float) * 4 * kChunk;
        constexpr std::uint32_t kTiles = 2 * (sizeof(to.state) + sizeof(to.deltas));
        full.arrive_expecting(first ? kTiles + kFirst + kSecond : kTiles);
        copy_bulk(to.state.x, static_cast<const Element*>(params_.history) + row * kK, sizeof(to.state), full);
        copy_bulk(to.residuals.x, static_cast<const Element*>(params_.residuals) + row * kChunk, sizeof(to.residuals),
                  full);
        copy_bulk(to.adjoint.x, static_cast<const Element*>(params_.adjoints) + row * kK, sizeof(to.adjoint), full);
        copy_bulk(to.deltas.x, static_cast<const Element*>(params_.deltas) + row * kChunk, sizeof(to.deltas), full);
        if (!first) return;
        const Record* from = static_cast<const Record*>(params_.prepared) + at;
        sm80::RowFactors<kChunk>& f = shared_.factors[heads_ % Config::kFactors];
        copy_bulk(f.beta, from->beta, kFirst, full);
        copy_bulk(f.high, from->high, kSecond, full);
    }

    // Whether the rows come in the background; else they are there.
    template <class Tile>
    __device__ __forceinline__ bool fill_rows(Tile& tile, const TokenRows& from) {
        using Input = typename Op::Input;
        constexpr int kVectors = Tile::kColumns / 8, kStep = kThreads / kVectors;
        const GlobalRows<Input> rows{static_cast<const Input*>(from.data), from.stride, from.rows, from.columns};
        if (from.dtype == kTypeOf<Input> && rows.whole_vectors()) {
            const int row = thread() / kVectors, column = thread() % kVectors * 8;
            static_assert(8 % kStep == 0);
            std::uint32_t to[8 / kStep];  // of rows that lie kStep apart, until they repeat
#pragma unroll
            for (int i = 0; i < 8 / kStep; ++i) to[i] = shared_address(tile.x) + Tile::offset(row + i * kStep, column);
            const int limit = column < from.columns ? from.rows - row : 0;
            const Input* at = rows.data + row * from.stride + column;
#pragma unroll
            for (int i = 0; i < Tile::kRows; i += kStep, at += kStep * from.stride) {
                copy_16_async(to[i % 8 / kStep] + i / 8 * 8 * Tile::kRowBytes, at, i < limit);
            }
            return true;
        }
        // NOTE: what fill_converted() does; a call would have these warps spill.
        constexpr int kPairs = Tile::kColumns / 2;
#pragma unroll 1
        for (int at = thread(); at < Tile::kRows * kPairs; at += kThreads) {
            const int row = at / kPairs, column = at % kPairs * 2;
            float x[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const bool inside = row < from.rows && column + j < from.columns;
                x[j] = inside ? load_element(from.data, from.dtype, row * from.stride + column + j) : 0.0f;
            }
            tile.set(row, column, Pair<Op>::of(x[0], x[1]));
        }
        return false;
    }

    const GradientParams& params_;
    const BackwardCall& call_;
    const Problem& p_;
    GradientShared<Config>& shared_;
    Turn<Config::kRows> rows_;
    Turn<Config::kStages> stage_;
    std::uint32_t heads_ = 0;  // begun so far
};

// One of the two warpgroups that compute.
template <class Config>
class ChunkGradients {
    using Op = typename Config::Op;
    using Element = typename Op::Element;
    using ChunkRows = GradientRows<Config>;
    using Stage = GradientStage<Config>;
    using Factors = sm80::RowFactors<Config::kChunk>;
    static constexpr int kChunk = Config::kChunk, kColumns = Config::kColumns, kWidth = Config::kWidth;
    static constexpr int kHalves = Config::kHalves, kBlocks = kWidth / 8;
    using Keys = float[kBlocks][4];  // 64 tokens and the warpgroup's keys
    using RowFragments = Fragment<Op>[kBlocks / 2];
    using Triangle = float[4][4];  // 64 tokens and columns 16 t + 8 half() .. + 7

public:
    __device__ __forceinline__ ChunkGradients(const GradientParams& params, GradientShared<Config>& shared)
        : params_(params), call_(params.call), p_(params.call.problem), shared_(shared) {}

    __device__ __forceinline__ void run() {
        const int tiles = (p_.dim_v + kColumns - 1) / kColumns;
        Turn<Config::kRows> place;
#pragma unroll 1
        while (true) {
            shared_.rows_full[place.stage()].wait(place.round());
            const GradientItem& item = shared_.items[place.stage()];
            if (item.tokens == 0) break;
            fence_for_wgmma();
            zero(d_q_), zero(d_k_);
            load_rows(k_, shared_.rows[place.stage()].k);
            const std::int32_t group = call_.group();
#pragma unroll 1
            for (std::int32_t i = 0; i < group; ++i) {
                zero(out_), zero(outputs_), zero(system_);
#pragma unroll 1
                for (int tile = 0; tile < tiles; ++tile) {
                    // The group's last tile stays: there the triangles go.
                    add_tile(tile + 1 < tiles || i + 1 < group);
                }
                finish_head(shared_.rows[place.stage()], i, item);
            }
            add_triangle_products(shared_.rows[place.stage()], shared_.stages[stage_.stage()].triangles);
            release_stage();
            finish_rows(shared_.rows[place.stage()], item);
            release(shared_.rows_empty[place.stage()]);
            ++place.n;
        }
        shared_.heads_empty[head_.stage()].wait(head_.round() ^ 1);
        if (thread() == 0) shared_.heads[head_.stage()].tokens = 0;
        release(shared_.heads_full[head_.stage()]);
    }

private:
    // NOTE: what is made of the thread's number after this, is computed after this: dozens of addresses would otherwise
    // be computed before the loops and spill.
    __device__ __forceinline__ void from_here() { asm volatile("" : "+r"(thread_)); }
    __device__ __forceinline__ int thread() const { return static_cast<int>(thread_ % Config::kConsumers); }
    __device__ __forceinline__ int half() const { return thread() / 128; }
    __device__ __forceinline__ int warp() const { return thread() / 32 % 4; }
    __device__ __forceinline__ int lane() const { return thread() % 32; }
    // The lane's columns of an accumulator: this one and the next of each 8; and its two rows.
    __device__ __forceinline__ int column() const { return 2 * (lane() % 4); }
    __device__ __forceinline__ int row(int which) const { return 16 * warp() + lane() / 4 + 8 * which; }
    __device__ __forceinline__ int first_key() const { return kWidth * half(); }

    template <int kCount>
    static __device__ __forceinline__ void zero(float (&x)[kCount][4]) {
#pragma unroll
        for (int n = 0; n < kCount; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[n][e] = 0.0f;
    }
    static __device__ __forceinline__ void meet() { sync_threads<1, Config::kConsumers>(); }
    __device__ __forceinline__ void release(Barrier& empty) const {
        __syncwarp();
        if (lane() == 0) empty.arrive();
    }
    __device__ __forceinline__ void release_stage() {
        release(shared_.empty[stage_.stage()]);
        ++stage_.n;
    }

    // --------------------------------------------------------------------------------------------- a tile of V

    __device__ __forceinline__ void add_tile(bool done) {
        shared_.full[stage_.stage()].wait(stage_.round());
        fence_for_wgmma();
        const typename Stage::Tiles& s = shared_.stages[stage_.stage()].tiles;
        const Factors& f = shared_.factors[head_.n % Config::kFactors];
        constexpr Element kType{};
        constexpr Rows kAcross = Rows::across_k, kAlong = Rows::along_k;
        const int side = uniform(half()), key = kWidth * side;
        const auto d_o = s.d_o.along_k();
        const auto w = across_k(s.residuals, 0), x = across_k(s.deltas, 0), columns = across_k<2>(s.deltas, 8 * side);
        const auto state = across_k(s.state, key), adjoint = across_k(s.adjoint, key);
        Keys part;  // W' S^T, then X D^T
        wgmma_fence();
#pragma unroll
        for (int v = 0; v < kColumns; v += 16) wgmma<kAcross, kAcross>(part, w(v), state(v), v > 0, kType);
        wgmma_commit();
#pragma unroll
        for (int v = 0; v < kColumns; v += 16) {
            wgmma<kAlong, kAcross>(out_, d_o(v), state(v), true, kType);
            wgmma<kAlong, kAcross>(outputs_, d_o(v), columns(v), true, kType);
            wgmma<kAcross, kAcross>(system_, w(v), columns(v), true, kType);
        }
        wgmma_commit();
        wgmma_wait<1>();
        anew(k_);
        add_keys(d_k_, part, k_, {-f.read[row(0)], -f.read[row(1)]}, read_dot_);
        wgmma_fence();
#pragma unroll
        for (int v = 0; v < kColumns; v += 16) wgmma<kAcross, kAcross>(part, x(v), adjoint(v), v > 0, kType);
        wgmma_commit();
        from_here();
        add_along(s);
        add_value_dots(s);
        wgmma_wait<0>();
        if (done) release_stage();
        anew(k_);
        add_keys(d_k_, part, k_, {f.keep[row(0)], f.keep[row(1)]}, keep_dot_);
    }

    // <D, S>: a piece of 8 elements after the other.
    __device__ __forceinline__ void add_along(const typename Stage::Tiles& s) {
        constexpr int kPieces = kColumns * Config::kK / 8;
        const uint4* states = reinterpret_cast<const uint4*>(s.state.x) + thread();
        const uint4* adjoints = reinterpret_cast<const uint4*>(s.adjoint.x) + thread();
        float sum[4] = {};
#pragma unroll 2
        for (int i = 0; i < kPieces; i += Config::kConsumers) {
            const uint4 state = states[i], adjoint = adjoints[i];
            add_dot(sum[0], state.x, adjoint.x), add_dot(sum[1], state.y, adjoint.y);
            add_dot(sum[2], state.z, adjoint.z), add_dot(sum[3], state.w, adjoint.w);
        }
        along_ += (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
    static __device__ __forceinline__ void add_dot(float& sum, std::uint32_t a, std::uint32_t b) {
        const float2 x = unpack(a, Element{}), y = unpack(b, Element{});
        sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
    }

    // <W'_i, v_i>: the warp's rows, half of the columns.
    __device__ __forceinline__ void add_value_dots(const typename Stage::Tiles& s) {
#pragma unroll
        for (int v = 0; v < kColumns / kHalves; v += 16) {
            const int at = v + kColumns / kHalves * half();
            const Fragment<Op> w = s.residuals.a_transposed(at, 16 * warp()), values = s.v.a(16 * warp(), at);
#pragma unroll
            for (int block = 0; block < 4; ++block) {
                add_dot(value_dot_[block % 2], w.x[0][block], values.x[0][block]);
            }
        }
    }

    // ------------------------------------------------------------------------------------------ end of a head

    // What the head gives to dQ, its triangles to those of the group, and its sums over rows and columns.
    __device__ __forceinline__ void finish_head(const ChunkRows& rows, std::int32_t i, const GradientItem& item) {
        const Factors& f = shared_.factors[head_.n % Config::kFactors];
        HeadSums<Config>& sums = shared_.heads[head_.stage()];
        from_here();
        float query_dot[2] = {};
        {
            RowFragments fragments;
            load_rows(fragments, rows.q);
            anew(fragments);
            add_keys(d_q_, out_, fragments, {f.query[row(0)], f.query[row(1)]}, query_dot);
        }
        const int side = uniform(half());
        Triangle by_queries, by_keys;  // Q K^T and K K^T, what the gates' exponents multiply
        constexpr Element kType{};
        const auto q = rows.q.along_k(), k = rows.k.along_k(), columns = rows.k.along_k_by_two(side);
        wgmma_fence();
#pragma unroll
        for (int at = 0; at < Config::kK; at += 16) {
            wgmma<Rows::along_k, Rows::along_k>(by_queries, q(at), columns(at), at > 0, kType);
            wgmma<Rows::along_k, Rows::along_k>(by_keys, k(at), columns(at), at > 0, kType);
        }
        wgmma_commit();
        shared_.heads_empty[head_.stage()].wait(head_.round() ^ 1);
        along_ = warp_sum(along_);
        if (lane() == 0) sums.along[thread() / 32] = along_;
        along_ = 0.0f;
        if (thread() == 0) {
            sums.total = f.total[0];
            sums.tokens = item.tokens;
            sums.at = (item.number * p_.heads_v + call_.value_head(item.key_head, i)) * kChunk;
        }
        wgmma_wait<0>();
        float outputs[2] = {}, system[2] = {};
        finish_triangles(f, sums, by_queries, by_keys, outputs, system);
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int at = row(which);
            const float query = sum_lanes<1, 4>(query_dot[which]), reads = sum_lanes<1, 4>(read_dot_[which]);
            const float keep = sum_lanes<1, 4>(keep_dot_[which]), value = sum_lanes<1, 4>(value_dot_[which]);
            const float out = sum_lanes<1, 4>(outputs[which]), own = sum_lanes<1, 4>(system[which]);
            if (lane() % 4 == 0) {
                const float read = expf(f.high[at] + f.low[at]) * f.norm_k[at] * reads;
                sums.gamma[half()][at] = sm80::gamma_of_token(f.query[at] * query, read, out, own, f.beta[at]);
                sums.beta[half()][at] = sm80::beta_of_token(value, read, own);
                sums.keep[half()][at] = f.keep[at] * keep;
            }
            read_dot_[which] = keep_dot_[which] = value_dot_[which] = 0.0f;
        }
        release(shared_.heads_full[head_.stage()]);
        ++head_.n;
        const std::int32_t group = call_.group();
        if (group > 1) share_triangles(i > 0, i + 1 < group);
    }

    template <class Tile>
    __device__ __forceinline__ void load_rows(RowFragments& to, const Tile& rows) const {
#pragma unroll
        for (int n = 0; n < kBlocks / 2; ++n) to[n] = rows.a(16 * warp(), first_key() + 16 * n);
    }

    // NOTE: what is made of x after this, is computed after this; the numbers unpacked for one product would otherwise
    // be kept for the next and spill.
    static __device__ __forceinline__ void anew(RowFragments& x) {
#pragma unroll
        for (int n = 0; n < kBlocks / 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(x[n].x[0][i]));
    }

    // to += factor x, and the inner products of x with the rows.
    static __device__ __forceinline__ void add_keys(Keys& to, const Keys& x, const RowFragments& rows, float2 factor,
                                                    float (&dot)[2]) {
        add_dots(x, rows, dot);
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) to[n][e] = fmaf(e < 2 ? factor.x : factor.y, x[n][e], to[n][e]);
    }
    static __device__ __forceinline__ void add_dots(const Keys& x, const RowFragments& rows, float (&dot)[2]) {
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const float2 y = rows[n / 2].pair(2 * (n % 2) + which).value();
                dot[which] = fmaf(y.x, x[n][2 * which], fmaf(y.y, x[n][2 * which + 1], dot[which]));
            }
    }

    // P' and L' become Gamma o P' and Z, norms and scale included. The diagonal of H is left out: it would be
    // subtracted from itself.
    __device__ __forceinline__ void finish_triangles(const Factors& f, HeadSums<Config>& sums,
                                                     const Triangle& by_queries, const Triangle& by_keys,
                                                     float (&outputs)[2], float (&system)[2]) {
        float leaves[8] = {};
        const float high[2] = {f.high[row(0)], f.high[row(1)]}, low[2] = {f.low[row(0)], f.low[row(1)]};
        const float norm_q[2] = {f.norm_q[row(0)], f.norm_q[row(1)]};
        const float norm_k[2] = {f.norm_k[row(0)], f.norm_k[row(1)]}, beta[2] = {f.beta[row(0)], f.beta[row(1)]};
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            if (t > warp()) {
#pragma unroll
                for (int e = 0; e < 4; ++e) outputs_[t][e] = system_[t][e] = 0.0f;
                continue;
            }
            const int first = 16 * t + 8 * half() + column();
            const float2 highs = pair_of(f.high, first), lows = pair_of(f.low, first), norms = pair_of(f.norm_k, first);
#pragma unroll
            for (int at = 0; at < 4; ++at) {
                const int e = at % 2, which = at / 2, i = row(which), j = first + e;
                const float between =
                    __expf((high[which] - (e == 0 ? highs.x : highs.y)) + (low[which] - (e == 0 ? lows.x : lows.y)));
                const float right = (e == 0 ? norms.x : norms.y) * between;
                const float x = norm_q[which] * right * outputs_[t][at], z = -norm_k[which] * right * system_[t][at];
                const float h = i > j ? x * by_queries[t][at] : 0.0f, g = i > j ? z * by_keys[t][at] : 0.0f;
                outputs_[t][at] = i >= j ? x : 0.0f;
                system_[t][at] = i > j ? beta[which] * z : 0.0f;
                outputs[which] += h;
                system[which] += g;
                leaves[2 * t + e] += fmaf(beta[which], g, h);
            }
        }
        share_sums<8, 8, 4>(leaves, lane() / 4);
        const int block = lane() / 4;
        sums.leaves[warp()][8 * half() + 16 * (block / 2) + column() + block % 2] = leaves[0];
    }

    // Adds what the heads before have left, and leaves the sum for the next.
    __device__ __forceinline__ void share_triangles(bool before, bool after) {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            if (t > warp()) continue;
            auto& place = shared_.sums[half()][warp() * (warp() + 1) / 2 + t];
            if (before) {
                const float4 x = place[0][lane()], z = place[1][lane()];
                outputs_[t][0] += x.x, outputs_[t][1] += x.y, outputs_[t][2] += x.z, outputs_[t][3] += x.w;
                system_[t][0] += z.x, system_[t][1] += z.y, system_[t][2] += z.z, system_[t][3] += z.w;
            }
            if (after) {
                place[0][lane()] = {outputs_[t][0], outputs_[t][1], outputs_[t][2], outputs_[t][3]};
                place[1][lane()] = {system_[t][0], system_[t][1], system_[t][2], system_[t][3]};
            }
        }
    }

    // ------------------------------------------------------------------------------------------ end of the chunk

    // The triangles go where the last tile of V has been.
    __device__ __forceinline__ void add_triangle_products(const ChunkRows& rows, typename Stage::Triangles& to) {
        meet();
        from_here();
#pragma unroll
        for (int t = 0; t < 4; ++t)
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const int at = row(which), first = 16 * t + 8 * half() + column();
                set(to.weight, at, first, {outputs_[t][2 * which], outputs_[t][2 * which + 1]});
                set(to.z, at, first, {system_[t][2 * which], system_[t][2 * which + 1]});
            }
        fence_for_wgmma();
        meet();
        constexpr Element kType{};
        constexpr Rows kAcross = Rows::across_k, kAlong = Rows::along_k;
        const int key = kWidth * uniform(half());
        const auto k = rows.k.across_k_from(key), q = rows.q.across_k_from(key);
        wgmma_fence();
#pragma unroll
        for (int term = 0; term < 2; ++term) {
            const auto weight = to.weight[term].along_k(), z = to.z[term].along_k();
            const auto weight_turned = to.weight[term].across_k(), z_turned = to.z[term].across_k();
#pragma unroll
            for (int b = 0; b < kChunk; b += 16) {
                wgmma<kAlong, kAcross>(d_q_, weight(b), k(b), true, kType);
                wgmma<kAcross, kAcross>(d_k_, weight_turned(b), q(b), true, kType);
                wgmma<kAlong, kAcross>(d_k_, z(b), k(b), true, kType);
                wgmma<kAcross, kAcross>(d_k_, z_turned(b), k(b), true, kType);
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
    }

    template <class Tile>
    static __device__ __forceinline__ void set(Tile (&terms)[2], int i, int j, float2 x) {
#pragma unroll
        for (int term = 0; term < 2; ++term) {
            const Pair<Op> pair = Pair<Op>::of(x.x, x.y);
            terms[term].set(i, j, pair);
            const float2 rounded = pair.value();
            x.x -= rounded.x, x.y -= rounded.y;
        }
    }

    // Undoes the norms and stores: x' = x - norm^2 row <row, x>; the factor of the row itself is in x already.
    __device__ __forceinline__ void finish_rows(ChunkRows& rows, const GradientItem& item) {
        // The factors' place is still the last head's.
        const Factors& f = shared_.factors[(head_.n - 1) % Config::kFactors];
        auto& along = shared_.along_rows;
        RowFragments q;
        if (p_.qk_l2norm) {
            load_rows(q, rows.q);
            hand_over(d_q_, q, along[0]);
            hand_over(d_k_, k_, along[1]);
        }
        meet();  // and nobody reads others' rows any more
        if (p_.qk_l2norm) {
            const float unscale = 1.0f / p_.scale;
            undo_norm(d_q_, q, along[0], {f.norm_q[row(0)] * unscale, f.norm_q[row(1)] * unscale});
            undo_norm(d_k_, k_, along[1], {f.norm_k[row(0)], f.norm_k[row(1)]});
        }
        from_here();
        store(call_.d_q, item, rows.q, d_q_);
        store(call_.d_k, item, rows.k, d_k_);
    }

    __device__ __forceinline__ void hand_over(const Keys& x, const RowFragments& rows,
                                              float (&to)[kHalves][kChunk]) const {
        float dot[2] = {};
        add_dots(x, rows, dot);
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const float sum = sum_lanes<1, 4>(dot[which]);
            if (lane() % 4 == 0) to[half()][row(which)] = sum;
        }
    }
    __device__ __forceinline__ void undo_norm(Keys& x, const RowFragments& rows, const float (&dots)[kHalves][kChunk],
                                              float2 norm) const {
        const float along[2] = {(dots[0][row(0)] + dots[1][row(0)]) * norm.x * norm.x,
                                (dots[0][row(1)] + dots[1][row(1)]) * norm.y * norm.y};
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const float2 y = rows[n / 2].pair(2 * (n % 2) + which).value();
                x[n][2 * which] = fmaf(-along[which], y.x, x[n][2 * which]);
                x[n][2 * which + 1] = fmaf(-along[which], y.y, x[n][2 * which + 1]);
            }
    }

    // Rows of the operands' type change places in the tile, each warp in its own rows and keys, and leave in stores of
    // 16 bytes.
    template <class Tile>
    __device__ __forceinline__ void store(const TokenRef& to, const GradientItem& item, Tile& tile,
                                          const Keys& x) const {
        if (!to) return;
        const std::int64_t stride = only_here(to.token);
        const std::int64_t at = to.offset(item.batch, item.begin, item.key_head) + first_key();
        auto* data = static_cast<Element*>(to.data) + at;
        if (to.dtype == kTypeOf<Element> && p_.dim_k % 8 == 0 && stride % 8 == 0 &&
            reinterpret_cast<std::uintptr_t>(data) % 16 == 0) {
            __syncwarp();
#pragma unroll
            for (int n = 0; n < kBlocks; ++n)
#pragma unroll
                for (int which = 0; which < 2; ++which) {
                    tile.set(row(which), first_key() + 8 * n + column(),
                             Pair<Op>::of(x[n][2 * which], x[n][2 * which + 1]));
                }
            __syncwarp();
            constexpr int kPieces = kWidth / 8, kStep = 32 / kPieces;  // of a row; rows at a time
            const int piece = lane() % kPieces * 8;
            if (first_key() + piece >= p_.dim_k) return;
#pragma unroll
            for (int r = 0; r < 16; r += kStep) {
                const int i = 16 * warp() + lane() / kPieces + r;
                const char* from = reinterpret_cast<const char*>(tile.x) + Tile::offset(i, first_key() + piece);
                if (i < item.tokens) {
                    *reinterpret_cast<uint4*>(data + i * stride + piece) = *reinterpret_cast<const uint4*>(from);
                }
            }
            return;
        }
        with_type(to.dtype, to.data, [&]<class T>(T* elements) {
#pragma unroll
            for (int n = 0; n < kBlocks; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int i = row(e / 2), key = 8 * n + column() + e % 2;
                    if (i < item.tokens && first_key() + key < p_.dim_k) {
                        elements[at + i * stride + key] = from_float<T>(x[n][e]);
                    }
                }
        });
    }

    const GradientParams& params_;
    const BackwardCall& call_;
    const Problem& p_;
    GradientShared<Config>& shared_;
    std::uint32_t thread_ = threadIdx.x;
    Turn<Config::kStages> stage_;
    Turn<Config::kHeads> head_;

    RowFragments k_;             // the warp's rows and keys of K
    Keys d_q_, d_k_;             // of all heads so far
    Keys out_;                   // dO S^T of this head
    Triangle outputs_, system_;  // P' and -L', then what the group has of them
    float read_dot_[2] = {}, keep_dot_[2] = {}, value_dot_[2] = {}, along_ = 0.0f;
};

// The warps that finish tokens, a thread for each.
template <class Config>
__device__ __forceinline__ void finish_tokens(const GradientParams& params, GradientShared<Config>& shared) {
    const int i = static_cast<int>(threadIdx.x) % Config::kFinishers;
    Turn<Config::kHeads> place;
#pragma unroll 1
    while (true) {
        shared.heads_full[place.stage()].wait(place.round());
        const HeadSums<Config>& sums = shared.heads[place.stage()];
        if (sums.tokens == 0) return;
        if (i < sums.tokens) {
            double leaves = 0.0, along = 0.0;
#pragma unroll
            for (int w = 0; w < 4; ++w) leaves += static_cast<double>(sums.leaves[w][i]);
            const bool last = i + 1 == sums.tokens;
            if (last) {
#pragma unroll
                for (int w = 0; w < 4 * Config::kHalves; ++w) along += static_cast<double>(sums.along[w]);
                along *= static_cast<double>(sums.total);
            }
            params.tokens[sums.at + i] =
                sm80::gradient_of_token(sums.gamma[0][i] + sums.gamma[1][i], sums.beta[0][i] + sums.beta[1][i], leaves,
                                        sums.keep[0][i] + sums.keep[1][i], along, last);
        }
        __syncwarp();
        if (i % 32 == 0) shared.heads_empty[place.stage()].arrive();
        ++place.n;
    }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    gradient_kernel(const __grid_constant__ GradientParams params, std::uint32_t items) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    auto& shared = aligned_shared_block<GradientShared<Config>>();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < Config::kStages; ++i) {
            shared.full[i].init(Config::kLoaders + 1);
            shared.empty[i].init(Config::kConsumers / 32);
        }
#pragma unroll
        for (int i = 0; i < Config::kRows; ++i) {
            shared.rows_full[i].init(Config::kLoaders + 1);
            shared.rows_empty[i].init(Config::kConsumers / 32);
        }
#pragma unroll
        for (int i = 0; i < Config::kHeads; ++i) {
            shared.heads_full[i].init(Config::kConsumers / 32);
            shared.heads_empty[i].init(Config::kFinishers / 32);
        }
        fence_barrier_init();
    }
    wait_for_earlier_grids();
    __syncthreads();
    if (threadIdx.x >= Config::kConsumers) {
        give_registers<Config::kOtherRegisters>();
        if (threadIdx.x < Config::kConsumers + Config::kLoaders) {
            GradientLoader<Config>(params, shared).run(items);
        } else {
            finish_tokens<Config>(params, shared);
        }
    } else {
        take_registers<Config::kConsumerRegisters>();
        ChunkGradients<Config>(params, shared).run();
    }
#endif
}

}  // namespace flashqla::cuda::sm90
