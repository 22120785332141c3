// flashqla::decode: check the arguments against the plan, then run the chosen backend.
#include <algorithm>

#include "api/guard.hpp"
#include "api/inputs.hpp"

namespace flashqla {
namespace {

constexpr const char* kName = "flashqla::decode";

void check_pool(Checks& checks, const DecodeArgs& args, DecodeCall& call, Dim slots) {
    const std::int64_t N = call.count;
    const bool pool = args.state_indices.given();
    call.state = checks.states("state", args.state, at_least(pool ? 0 : N), Role::in_place, Need::required);
    if (args.state_indices.rank == 2) {
        call.state_indices =
            checks.indices("state_indices", args.state_indices, {N, slots}, kIntegers, Need::optional, true);
        call.num_accepted = checks.indices("num_accepted", args.num_accepted, {N}, kIntegers);
        checks.unused("state_indices_out", args.state_indices_out, "state_indices has a slot for each token");
    } else {
        call.state_indices = checks.indices("state_indices", args.state_indices, {N}, kIntegers, Need::optional, true);
        checks.unused("num_accepted", args.num_accepted, "state_indices is not of shape [N,S]");
        call.state_indices_out =
            checks.indices("state_indices_out", args.state_indices_out, {N}, kIntegers, Need::optional, true);
    }
    if (!args.commit_state) {
        checks.unused("state_indices_out", args.state_indices_out, "commit_state is false");
    }
    call.has_initial_state = checks.indices("has_initial_state", args.has_initial_state, {N}, kFlags);
}

void check_intermediate(Checks& checks, const DecodeArgs& args, DecodeCall& call, Dim tokens) {
    const std::int64_t N = call.count;
    const Dim rows = at_least(args.intermediate_indices.given() ? 0 : N);
    call.intermediate_states =
        checks.state_steps("intermediate_states", args.intermediate_states, rows, tokens, Role::output);
    call.intermediate_steps = args.intermediate_states.given() ? args.intermediate_states.shape[1] : 0;
    call.intermediate_indices = checks.indices("intermediate_indices", args.intermediate_indices, {N}, kIntegers);
    call.parent_tokens = checks.indices("parent_tokens", args.parent_tokens, {N, tokens}, kIntegers);
    if (!args.intermediate_states.given()) {
        checks.unused("intermediate_indices", args.intermediate_indices, "intermediate_states is not");
        checks.unused("parent_tokens", args.parent_tokens, "intermediate_states is not");
    }
    if (args.commit_state) checks.unused("parent_tokens", args.parent_tokens, "commit_state is true");
}

}  // namespace

Status decode(const Plan& plan, const DecodeArgs& args, Workspace workspace, Stream stream) noexcept {
    return guarded<Status>(kName, [&]() -> Status {
        Checks checks(kName, plan, Pass::decode, workspace);
        if (!checks.ok()) return checks.status();

        DecodeCall call;
        call.commit_state = args.commit_state;
        check_inputs(checks, args, call);
        const Sizes n(call.problem);
        call.o = checks.tokens("o", args.o, {n.B, n.T, n.Hv, n.V}, one_of(call.problem.out), Role::output);
        // Packed rows say their own lengths (check_row_lengths).
        const Dim tokens = at_least(packed(call.problem) ? 0 : n.T);
        // The first column is read even when no row has a token.
        check_pool(checks, args, call, at_least(packed(call.problem) ? 1 : std::max<std::int64_t>(n.T, 1)));
        check_intermediate(checks, args, call, tokens);
        check_row_lengths(checks, call, args.state_indices.rank == 2 ? args.state_indices.shape[1] : 0);
        check_slots(checks, call);
        check_intermediate_rows(checks, call);
        check_parents(checks, call);
        checks.no_overlaps();
        if (!checks.ok()) return checks.status();

        return checks.planned().pass->run(call, checks.workspace(), stream);
    });
}

}  // namespace flashqla
