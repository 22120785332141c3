// The gates of one value head in one chunk: what its record says about rows, and the factors of its triangles. One warp
// does it; a lane has the kEach neighbouring tokens that begin with kEach * lane.
#pragma once

#include "cuda/device/chunks.cuh"
#include "cuda/device/gates.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/sm80/prepare/config.cuh"

namespace flashqla::cuda::sm80 {

template <class Config>
class HeadGates {
    static constexpr int kChunk = Config::kChunk, kOctets = Config::kOctets;
    using Record = typename Config::Record;
    static constexpr int kEach = kChunk / 32, kOctetLanes = 8 / kEach;

public:
    // Asks for g and beta. Tokens past the end are the last one here, so that no load waits for a comparison.
    __device__ __forceinline__ void load(const Inputs& in, const Chunk& chunk, std::int32_t head) {
        std::int64_t token[kEach];
#pragma unroll
        for (int j = 0; j < kEach; ++j) token[j] = chunk.begin + min(kEach * lane() + j, chunk.tokens - 1);
        load_bits_of(g_, in.g, chunk.batch, token, head);
        load_bits_of(beta_, in.beta, chunk.batch, token, head);
    }

    // Running sums and exponentials, and what needs no norm. Runs while the rows are on their way.
    __device__ __forceinline__ void begin(const Inputs& in, int tokens, std::int32_t head, HeadFactors<kChunk>& to,
                                          Record& record) {
        const HeadGate gate(in, head);
        double gamma[kEach];
        float beta[kEach];
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            const bool inside = kEach * lane() + j < tokens;
            const float g = in.g && inside ? gate.log_decay(in, g_[j]) : 0.0f;
            beta[j] = inside ? beta_of(in, beta_[j]) : 0.0f;
            gamma[j] = (j > 0 ? gamma[j - 1] : 0.0) + static_cast<double>(g);
        }
        const double before = warp_prefix(gamma[kEach - 1]) - gamma[kEach - 1];
        float high[kEach], low[kEach];
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            gamma[j] += before;
            high[j] = static_cast<float>(gamma[j]);
            low[j] = static_cast<float>(gamma[j] - high[j]);
        }
        put(to.high, high), put(to.low, low);
        put(record.high, high), put(record.low, low), put(record.beta, beta);
        const double last = gamma[kEach - 1], end = __shfl_sync(kFullWarp, last, 31);
        if (lane() == 0) record.total = expf(static_cast<float>(end));
        const int first = lane() / kOctetLanes * kOctetLanes;
        const double octet_end = __shfl_sync(kFullWarp, last, first + kOctetLanes - 1);
        double octet_start = __shfl_sync(kFullWarp, last, (first + 31) % 32);
        if (first == 0) octet_start = 0.0;
        float row[kEach], column[kEach], from_start[kEach];
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            row[j] = expf(static_cast<float>(gamma[j] - octet_start));
            column[j] = expf(static_cast<float>(octet_end - gamma[j]));
            from_start[j] = expf(static_cast<float>(gamma[j]));
            to_end_[j] = expf(static_cast<float>(end - gamma[j]));
        }
        // finish() makes these whole.
        put(to.own_lower, beta), put(to.row_lower, from_start), put(to.row_attention, row), put(to.column, column);
        // From the end of octet column to that of the one before octet row.
#pragma unroll
        for (int at = 0; at < kOctets * kOctets; at += 32) {
            const int entry = (at + lane()) % (kOctets * kOctets), r = entry / kOctets, c = entry % kOctets;
            const double till = __shfl_sync(kFullWarp, last, (r * kOctetLanes + 31) % 32);
            const double since = __shfl_sync(kFullWarp, last, (c + 1) * kOctetLanes - 1);
            to.between[r][c] = r > c ? __expf(static_cast<float>(till - since)) : 0.0f;
        }
    }

    // The rest, with the norms of the rows.
    __device__ __forceinline__ void finish(int tokens, const float* norm_k, const float* norm_q,
                                           HeadFactors<kChunk>& to, Record& record) const {
        float n_k[kEach], n_q[kEach], own[kEach], row_l[kEach], row_a[kEach], column[kEach], read[kEach], query[kEach],
            keep[kEach];
        get(n_k, norm_k), get(n_q, norm_q), get(own, to.own_lower), get(query, to.row_lower);
        get(row_a, to.row_attention), get(column, to.column);
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            const bool inside = kEach * lane() + j < tokens;
            read[j] = inside ? own[j] * query[j] * n_k[j] : 0.0f;
            query[j] = inside ? query[j] * n_q[j] : 0.0f;
            keep[j] = to_end_[j] * n_k[j];
            own[j] *= -n_k[j];
            row_l[j] = own[j] * row_a[j];
            row_a[j] *= n_q[j];
            column[j] *= n_k[j];
        }
        put(to.own_lower, own), put(to.row_lower, row_l), put(to.row_attention, row_a), put(to.column, column);
        put(record.read, read), put(record.query, query), put(record.keep, keep);
        put(record.norm_k, n_k), put(record.norm_q, n_q);
    }

private:
    struct alignas(4 * kEach) Each {
        float x[kEach];
    };

    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }

    static __device__ __forceinline__ void get(float (&x)[kEach], const float* from) {
        const Each each = reinterpret_cast<const Each*>(from)[lane()];
#pragma unroll
        for (int j = 0; j < kEach; ++j) x[j] = each.x[j];
    }
    static __device__ __forceinline__ void put(float* to, const float (&x)[kEach]) {
        Each each;
#pragma unroll
        for (int j = 0; j < kEach; ++j) each.x[j] = x[j];
        reinterpret_cast<Each*>(to)[lane()] = each;
    }

    static __device__ __forceinline__ void load_bits_of(std::uint32_t (&bits)[kEach], const TokenRef& from,
                                                        std::int64_t batch, const std::int64_t (&token)[kEach],
                                                        std::int32_t head) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            bits[j] = from ? load_bits(from.data, from.dtype, from.offset(batch, token[j], head)) : 0;
        }
    }

    std::uint32_t g_[kEach], beta_[kEach];  // bits
    float to_end_[kEach];                   // decay from the token to the end of the chunk
};

}  // namespace flashqla::cuda::sm80
