// What cu_seqlens and slot numbers say, where the host can read them: offsets in order, slots in range, no slot written
// twice or written by one row and read by another. Each check does nothing when an earlier one has failed.
#pragma once

#include "api/checks.hpp"

namespace flashqla {

void check_offsets(Checks& checks, const Inputs& in);

void check_slots(Checks& checks, const ForwardCall& call, bool one_pool);
void check_checkpoint_list(Checks& checks, const ForwardCall& call);

// Rows of at most kMaxDecodeTokens tokens, with room for each token in the slot table (`slots_per_row`; 0: there is
// none) and in the intermediate buffer.
void check_row_lengths(Checks& checks, const DecodeCall& call, std::int64_t slots_per_row);
void check_slots(Checks& checks, const DecodeCall& call);
void check_intermediate_rows(Checks& checks, const DecodeCall& call);
void check_parents(Checks& checks, const DecodeCall& call);

// Slots sorted in scratch of the caller's workspace.
class SlotSet {
public:
    explicit SlotSet(std::int64_t* scratch) noexcept : slots_(scratch) {}
    void add(std::int64_t slot) noexcept { slots_[count_++] = slot; }
    void sort() noexcept;
    std::int64_t repeated() const noexcept;  // -1 = none
    bool has(std::int64_t slot) const noexcept;

private:
    std::int64_t* slots_;
    std::int64_t count_ = 0;
};

}  // namespace flashqla
