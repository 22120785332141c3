// Validation of a Problem and of PlanOptions, and the facts that follow from them.
#pragma once

#include "flashqla/flashqla.hpp"

namespace flashqla {

// One sentence for the first fault found.
Status validate(const Problem& problem, Device device, const PlanOptions& options);

// A valid problem with out and scale filled in.
Problem with_defaults(const Problem& problem) noexcept;

// Rows of the state tensors: packed sequences, or one sequence a batch row.
inline std::int64_t sequence_count(const Problem& p) noexcept { return p.sequences > 0 ? p.sequences : p.batch; }

inline bool packed(const Problem& p) noexcept { return p.sequences > 0; }

// Longest run of tokens that a row of decode() may have under this problem; 0 = none, decode() is not planned.
inline std::int64_t decode_tokens(const Problem& p) noexcept {
    if (packed(p)) return p.tokens < kMaxDecodeTokens ? p.tokens : kMaxDecodeTokens;
    return p.tokens <= kMaxDecodeTokens ? p.tokens : 0;
}
inline bool can_decode(const Problem& p) noexcept { return packed(p) || p.tokens <= kMaxDecodeTokens; }

// Upper bound of the rows of the checkpoint tensor; 0 for none and listed.
std::int64_t checkpoint_bound(const Problem& problem) noexcept;

// Checkpoint rows of one sequence of `length` tokens (chunk_starts and every_n).
std::int64_t checkpoint_rows_of(const Problem& problem, std::int64_t length) noexcept;

}  // namespace flashqla
