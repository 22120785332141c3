// Where chunks and segments lie, and what the chunked kernels hand to each other through the workspace.
//
// The chunks of all sequences are numbered one after another, whole sequences in order; so are segments, runs of
// `segment_chunks` chunks that are computed at the same time. Lengths stay on the device: a packed call has two prefix
// sums and the choice of `segment_chunks`, which a kernel of one block writes, and everything else comes from bounds.
#pragma once

#include <cstdint>

#include "base/call.hpp"

namespace flashqla::cuda {

// How many pieces a length is cut into, the last one shorter.
FQLA_HOST_DEVICE constexpr std::int64_t pieces(std::int64_t length, std::int64_t piece) noexcept {
    return (length + piece - 1) / piece;
}

// What lengths decide.
struct SegmentChoice {
    std::int32_t segment_chunks = 1;  // chunks of a segment, the last one of a sequence may have fewer
    std::uint32_t launches = ~0u;     // which of the launches that may be needed are (SegmentCosts)
    std::int32_t segments = 0;        // of all sequences
    std::int32_t cut = 0;             // sequences with more than one
    bool windows = false;             // cuts are looked at: those whose past is forgotten are not carried
};

// Where a segment lies, so that who takes one reads it at once.
struct alignas(16) SegmentRecord {
    std::int64_t begin = 0;                // of the sequence's tokens
    std::int32_t length = 0;               // tokens of the sequence
    std::int32_t n = 0, index = 0;         // the sequence; which of its segments
    std::int32_t first_token = 0;          // of the sequence
    std::int32_t chunks = 0, is_last = 1;  // the sequence ends with it
};

inline constexpr int kTakenCounts = 2;  // of ChunkTable::taken

struct ChunkTable {
    const std::int32_t* chunks = nullptr;    // [N+1] number of the first chunk of each sequence; null: fixed length
    const std::int32_t* segments = nullptr;  // [N+1] the same for segments
    const SegmentChoice* choice = nullptr;   // of a packed call; null: `segment_chunks`
    std::int32_t chunk = 64;                 // tokens
    std::int32_t segment_chunks = 1;
    std::uint32_t launch = ~0u;              // whose blocks ask: they leave unless the choice has one of these bits
    const SegmentRecord* records = nullptr;  // [segments]; null where nothing asks for them
    const std::int32_t* cut = nullptr;       // the sequences with more than one segment, SegmentChoice::cut of them
    // How many of a kernel's items its blocks have taken, zero before it, for each kind of work that is counted apart
    // (kTakenCounts); null: blocks share them out evenly. Only for kernels whose blocks stay.
    std::uint32_t* taken = nullptr;
};

// What the prepare kernel hands on: a record for each chunk and value head. Norms and scale are folded in. Rows past
// the end of the sequence have beta = read = query = 0 and repeat the last running sum. The triangles have the layout
// of SharedTriangle; a kernel copies the first bytes of a record, up to what it needs, as they are.
template <class Element, int kParts, int kChunk>
struct alignas(16) PreparedChunk {
    static constexpr int kTriangle = (kChunk / 16) * (kChunk / 16 + 1) / 2 * 256;  // elements of a part

    float beta[kChunk];
    float read[kChunk];      // beta_i e_i n_k,i: beta_i v_i - read_i (k_i S) is the residual that T multiplies
    float query[kChunk];     // scale e_i n_q,i: of q_i S
    float keep[kChunk];      // r_i n_k,i: of k_i x_i^T in the state that leaves
    float total, unused[3];  // exp(gamma_C)
    // T = (I + L)^-1, in two parts whatever the operands have: it takes differences of residuals that may be nearly
    // equal.
    Element inverse[2 * kTriangle];
    Element attention[kParts * kTriangle];  // P = tril(Gamma o Q^ K^^T)
    float high[kChunk], low[kChunk];        // running sum of g, an unevaluated sum of two floats
    float norm_k[kChunk], norm_q[kChunk];   // n_k,i and scale n_q,i
};

// V of a block of the state kernels, and V padded to whole blocks.
inline constexpr int kChunkColumns = 64;
FQLA_HOST_DEVICE constexpr int padded_columns(std::int32_t dim_v) noexcept {
    return (dim_v + kChunkColumns - 1) / kChunkColumns * kChunkColumns;
}

}  // namespace flashqla::cuda
