// flashqla::commit: the second half of the intermediate-buffer contract, a plain copy of accepted states.
#include <cstring>

#include "api/guard.hpp"
#include "api/inputs.hpp"
#include "base/float16.hpp"

namespace flashqla {
namespace {

constexpr const char* kName = "flashqla::commit";

void check_moves(Checks& checks, const CommitCall& call) {
    if (!checks.ok() || !checks.host_reads()) return;
    SlotSet written(checks.slot_check());
    for (std::int64_t n = 0; n < call.count; ++n) {
        const Move move = move_of(call, n);
        if (move.slot < 0) continue;
        if (move.slot >= call.state.rows) {
            return checks.bad("state_indices sends row ", n, " to slot ", move.slot, "; state has ", call.state.rows,
                              " slots");
        }
        if (move.m >= call.intermediate_states.rows) {
            return checks.bad("intermediate_indices[", n, "] is ", move.m, "; intermediate_states has ",
                              call.intermediate_states.rows, " rows");
        }
        written.add(move.slot);
    }
    written.sort();
    if (const std::int64_t slot = written.repeated(); slot >= 0) {
        checks.bad("state_indices names slot ", slot, " twice; what is written must be unique");
    }
}

void copy_states(const CommitCall& call) noexcept {
    const std::int64_t inner = std::int64_t{call.dim_k} * call.dim_v;
    const StateRef &to = call.state, &from = call.intermediate_states;
    const auto to_bytes = static_cast<std::int64_t>(size_of(to.dtype));
    const auto from_bytes = static_cast<std::int64_t>(size_of(from.dtype));
    for (std::int64_t n = 0; n < call.count; ++n) {
        const Move move = move_of(call, n);
        if (move.slot < 0) continue;
        for (std::int64_t h = 0; h < call.heads_v; ++h) {
            auto* target = static_cast<std::byte*>(to.data) + to.offset(move.slot, h) * to_bytes;
            const std::int64_t offset = from.offset(move.m, h) + move.step * from.step;
            const auto* source = static_cast<const std::byte*>(from.data) + offset * from_bytes;
            if (to.dtype == from.dtype) {
                std::memcpy(target, source, static_cast<std::size_t>(inner * to_bytes));
                continue;
            }
            for (std::int64_t i = 0; i < inner; ++i) {
                store_float(target, to.dtype, i, load_float(source, from.dtype, i));
            }
        }
    }
}

}  // namespace

Status commit(const Plan& plan, const CommitArgs& args, Workspace workspace, Stream stream) noexcept {
    return guarded<Status>(kName, [&]() -> Status {
        Checks checks(kName, plan, Pass::decode, workspace);
        if (!checks.ok()) return checks.status();

        const Problem& p = checks.plan().problem;
        const std::int64_t N = sequence_count(p);
        CommitCall call;
        call.count = N;
        call.heads_v = p.heads_v;
        call.dim_k = p.dim_k;
        call.dim_v = p.dim_v;
        call.pad_rule = p.pad_rule;
        const auto rows = [N](const TensorView& indices) { return at_least(indices.given() ? 0 : N); };
        const Dim tokens = at_least(packed(p) ? 0 : p.tokens);
        call.state = checks.states("state", args.state, rows(args.state_indices), Role::in_place, Need::required);
        call.intermediate_states =
            checks.state_steps("intermediate_states", args.intermediate_states, rows(args.intermediate_indices), tokens,
                               Role::input, Need::required);
        call.steps = packed(p) ? args.intermediate_states.shape[1] : p.tokens;
        call.state_indices = checks.indices("state_indices", args.state_indices, {N}, kIntegers, Need::optional, true);
        call.intermediate_indices = checks.indices("intermediate_indices", args.intermediate_indices, {N}, kIntegers);
        call.accepted = checks.indices("accepted", args.accepted, {N}, kIntegers, Need::required);
        check_moves(checks, call);
        checks.no_overlaps();
        if (!checks.ok()) return checks.status();
        if (!checks.host_reads()) return checks.planned().pass->run(call, checks.workspace(), stream);
        copy_states(call);
        return {};
    });
}

}  // namespace flashqla
