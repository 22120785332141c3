// What chunks need before the state passes through them: factors of rows, the inverse, the attention triangle.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/call.hpp"
#include "cuda/chunks.hpp"
#include "cuda/device/divide.cuh"

namespace flashqla::cuda::sm80 {

// The size of K that a chunked kernel is made for: 64, 128 or 256.
constexpr int chunk_width(std::int32_t dim_k) noexcept { return dim_k <= 64 ? 64 : dim_k <= 128 ? 128 : 256; }

// Parts of an operand, by the type of q, k and v.
constexpr int chunk_parts(DType io) noexcept { return io == DType::f32 ? 2 : 1; }

// Tokens of a chunk. With two parts or more than 128 keys, what a chunk needs would not fit with 64.
constexpr int chunk_tokens(int parts, int width) noexcept { return parts == 2 || width > 128 ? 32 : 64; }
constexpr int chunk_tokens(const Problem& p) noexcept { return chunk_tokens(chunk_parts(p.io), chunk_width(p.dim_k)); }

// Bytes of a record. Every element of an operand has two bytes.
constexpr std::size_t prepared_bytes(const Problem& p) noexcept {
    if (chunk_parts(p.io) == 2) return sizeof(PreparedChunk<std::uint16_t, 2, 32>);
    return chunk_tokens(p) == 32 ? sizeof(PreparedChunk<std::uint16_t, 1, 32>)
                                 : sizeof(PreparedChunk<std::uint16_t, 1, 64>);
}

// Value heads that a block has at most.
inline constexpr std::int32_t kMostPreparedHeads = 4;

struct PrepareParams {
    Inputs in;
    ChunkTable table;
    void* to = nullptr;      // PreparedChunk [chunks][Hv]
    std::int32_t share = 1;  // value heads of a group that a block has, or fewer
    // Filled in by the launch.
    std::int32_t group = 1;
    Divider shares{}, key_heads{};
};

// One block for each of `chunks` (a bound), key heads and shares of a group.
Status launch_prepare(const char* function, const PrepareParams& params, std::int64_t chunks, int device,
                      Stream stream) noexcept;

}  // namespace flashqla::cuda::sm80
