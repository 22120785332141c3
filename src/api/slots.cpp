#include "api/slots.hpp"

#include <algorithm>

namespace flashqla {
namespace {

void check_range(Checks& checks, const char* indices, std::int64_t n, std::int64_t slot, const char* pool,
                 std::int64_t rows) {
    if (slot >= rows) checks.bad(indices, " sends row ", n, " to slot ", slot, "; ", pool, " has ", rows, " slots");
}

void check_unique(Checks& checks, SlotSet& written, const char* indices, const char* what) {
    written.sort();
    const std::int64_t slot = written.repeated();
    if (slot >= 0) checks.bad(indices, " names ", what, " ", slot, " twice; what is written must be unique");
}

}  // namespace

void SlotSet::sort() noexcept { std::sort(slots_, slots_ + count_); }

std::int64_t SlotSet::repeated() const noexcept {
    const std::int64_t* at = std::adjacent_find(slots_, slots_ + count_);
    return at == slots_ + count_ ? -1 : *at;
}

bool SlotSet::has(std::int64_t slot) const noexcept { return std::binary_search(slots_, slots_ + count_, slot); }

void check_offsets(Checks& checks, const Inputs& in) {
    if (!checks.ok() || !checks.host_reads() || !in.cu_seqlens) return;
    std::int64_t before = in.cu_seqlens.at(0);
    if (before != 0) return checks.bad("cu_seqlens starts at ", before, "; it must start at 0");
    for (std::int64_t n = 1; n <= in.count; ++n) {
        const std::int64_t offset = in.cu_seqlens.at(n);
        if (offset < before) {
            return checks.bad("cu_seqlens[", n, "] is ", offset, " after ", before, "; offsets must never decrease");
        }
        before = offset;
    }
    if (before > in.problem.tokens) {
        checks.bad("cu_seqlens ends at ", before, "; this plan has ", in.problem.tokens, " tokens");
    }
}

void check_slots(Checks& checks, const ForwardCall& call, bool one_pool) {
    if (!checks.ok() || !checks.host_reads() || !(call.state_indices || call.state_indices_out)) return;
    const char* const target = call.state_indices_out ? "state_indices_out" : "state_indices";
    SlotSet written(checks.slot_check());
    for (std::int64_t n = 0; checks.ok() && n < call.count; ++n) {
        const Slots slots = slots_of(call, n);
        check_range(checks, "state_indices", n, slots.read, "initial_state", call.initial_state.rows);
        check_range(checks, target, n, slots.write, "final_state", call.final_state.rows);
        if (slots.write >= 0) written.add(slots.write);
    }
    if (!checks.ok()) return;
    check_unique(checks, written, target, "slot");

    // In place, a slot that one row writes is no start for another. Without state_indices_out each row reads its own.
    if (!one_pool || !call.state_indices_out) return;
    for (std::int64_t n = 0; checks.ok() && n < call.count; ++n) {
        const Slots slots = slots_of(call, n);
        if (slots.read >= 0 && slots.read != slots.write && written.has(slots.read)) {
            checks.bad("row ", n, " reads slot ", slots.read,
                       ", which another row writes through state_indices_out; such a slot may have no other reader");
        }
    }
}

void check_checkpoint_list(Checks& checks, const ForwardCall& call) {
    if (!checks.ok() || !checks.host_reads() || !call.checkpoint_list) return;
    for (std::int64_t row = 0; row < call.checkpoint_list.count; ++row) {
        const std::int64_t sequence = call.checkpoint_list.at(row, 0), token = call.checkpoint_list.at(row, 1);
        if (sequence < 0) continue;
        if (sequence >= call.count) {
            return checks.bad("checkpoint_list[", row, "] names sequence ", sequence, "; this plan has ", call.count,
                              " sequences");
        }
        const std::int64_t length = span_of(call, sequence).length;
        if (token < 0 || token > length) {
            return checks.bad("checkpoint_list[", row, "] names token ", token, " of sequence ", sequence,
                              "; it must be between 0 and the length, ", length);
        }
    }
}

void check_row_lengths(Checks& checks, const DecodeCall& call, std::int64_t slots_per_row) {
    if (!checks.ok() || !checks.host_reads()) return;
    for (std::int64_t n = 0; n < call.count; ++n) {
        const std::int64_t length = span_of(call, n).length;
        if (length > kMaxDecodeTokens) {
            return checks.bad("row ", n, " has ", length, " tokens; decode takes at most ", kMaxDecodeTokens);
        }
        if (slots_per_row > 0 && length > slots_per_row) {
            return checks.bad("row ", n, " has ", length, " tokens; state_indices has ", slots_per_row,
                              " slots for it");
        }
        if (call.intermediate_states && length > call.intermediate_steps && intermediate_row(call, n) >= 0) {
            return checks.bad("row ", n, " has ", length, " tokens; intermediate_states has ", call.intermediate_steps,
                              " places for it");
        }
        if (call.parent_tokens && length > call.parent_tokens.columns) {
            return checks.bad("row ", n, " has ", length, " tokens; parent_tokens has ", call.parent_tokens.columns,
                              " entries for it");
        }
    }
}

void check_slots(Checks& checks, const DecodeCall& call) {
    if (!checks.ok() || !checks.host_reads()) return;
    if (!(call.state_indices || call.state_indices_out)) return;
    const char* const target = call.state_indices_out ? "state_indices_out" : "state_indices";
    const std::int64_t pool = call.state.rows;
    SlotSet written(checks.slot_check());
    for (std::int64_t n = 0; checks.ok() && n < call.count; ++n) {
        const Slots slots = slots_of(call, n);
        if (slots.padding) continue;
        check_range(checks, "state_indices", n, slots.read, "state", pool);
        check_range(checks, target, n, slots.write, "state", pool);
        if (slots.write >= 0) written.add(slots.write);
        for (std::int64_t t = 0, length = span_of(call, n).length; t < length; ++t) {
            const std::int64_t slot = token_slot(call, n, t);
            check_range(checks, target, n, slot, "state", pool);
            if (slot >= 0) written.add(slot);
        }
    }
    if (!checks.ok()) return;
    check_unique(checks, written, target, "slot");

    if (!call.state_indices_out && !call.slot_per_token()) return;
    for (std::int64_t n = 0; checks.ok() && n < call.count; ++n) {
        const Slots slots = slots_of(call, n);
        if (slots.padding || slots.read < 0 || slots.read == slots.write || !written.has(slots.read)) continue;
        bool own = false;
        for (std::int64_t t = 0, length = span_of(call, n).length; t < length; ++t) {
            own = own || token_slot(call, n, t) == slots.read;
        }
        if (!own) {
            checks.bad("row ", n, " reads slot ", slots.read, ", which another row writes through ", target,
                       "; such a slot may have no other reader");
        }
    }
}

void check_intermediate_rows(Checks& checks, const DecodeCall& call) {
    if (!checks.ok() || !checks.host_reads() || !call.intermediate_indices) return;
    SlotSet written(checks.slot_check());
    for (std::int64_t n = 0; checks.ok() && n < call.count; ++n) {
        const std::int64_t m = intermediate_row(call, n);
        if (m < 0 || slots_of(call, n).padding) continue;
        if (m >= call.intermediate_states.rows) {
            checks.bad("intermediate_indices[", n, "] is ", m, "; intermediate_states has ",
                       call.intermediate_states.rows, " rows");
        }
        written.add(m);
    }
    if (checks.ok()) check_unique(checks, written, "intermediate_indices", "row");
}

void check_parents(Checks& checks, const DecodeCall& call) {
    if (!checks.ok() || !checks.host_reads() || !call.parent_tokens) return;
    for (std::int64_t n = 0; n < call.count; ++n) {
        if (slots_of(call, n).padding) continue;
        const std::int64_t length = span_of(call, n).length;
        if (length > 0 && intermediate_row(call, n) < 0) {
            return checks.bad("parent_tokens needs a row of intermediate_states for each row; row ", n, " has none");
        }
        for (std::int64_t t = 0; t < length; ++t) {
            const std::int64_t parent = call.parent_tokens.at(n, t);
            if (parent >= t) {
                return checks.bad("parent_tokens[", n, ",", t, "] is ", parent, "; a parent comes before its token");
            }
        }
    }
}

}  // namespace flashqla
