// flashqla::forward: check the arguments against the plan, then run the chosen backend.
#include "api/guard.hpp"
#include "api/inputs.hpp"

namespace flashqla {
namespace {

constexpr const char* kName = "flashqla::forward";

void check_states(Checks& checks, const ForwardArgs& args, ForwardCall& call) {
    const std::int64_t N = call.count;
    const bool read_pool = args.state_indices.given(), write_pool = read_pool || args.state_indices_out.given();
    call.initial_state =
        checks.states("initial_state", args.initial_state, read_pool ? at_least(0) : Dim(N), Role::input);
    call.final_state = checks.states("final_state", args.final_state, write_pool ? at_least(0) : Dim(N), Role::output);
    call.state_indices = checks.indices("state_indices", args.state_indices, {N}, kIntegers, Need::optional, true);
    call.state_indices_out =
        checks.indices("state_indices_out", args.state_indices_out, {N}, kIntegers, Need::optional, true);
    call.has_initial_state = checks.indices("has_initial_state", args.has_initial_state, {N}, kFlags);

    if (!args.initial_state.given()) {
        checks.unused("has_initial_state", args.has_initial_state, "initial_state is not");
        if (!args.final_state.given()) {
            checks.unused("state_indices", args.state_indices, "neither initial_state nor final_state is");
        }
    }
    if (!args.final_state.given()) {
        checks.unused("state_indices_out", args.state_indices_out, "final_state is not");
    }
    check_slots(checks, call, call.initial_state.data == call.final_state.data);
}

void check_checkpoints(Checks& checks, const ForwardArgs& args, ForwardCall& call) {
    const Problem& p = call.problem;
    if (p.checkpoints == Checkpoints::none) {
        checks.unused("checkpoints", args.checkpoints, "this plan has Checkpoints::none");
        checks.unused("checkpoint_list", args.checkpoint_list, "this plan has Checkpoints::none");
        return;
    }
    if (p.checkpoints == Checkpoints::listed) {
        call.checkpoint_list =
            checks.indices("checkpoint_list", args.checkpoint_list, {at_least(0), 2}, kIntegers, Need::required);
        call.checkpoints = checks.states("checkpoints", args.checkpoints, Dim(call.checkpoint_list.count), Role::output,
                                         Need::required);
        return check_checkpoint_list(checks, call);
    }
    checks.unused("checkpoint_list", args.checkpoint_list, "only Checkpoints::listed uses it");
    std::int64_t rows = checkpoint_bound(p);
    if (checks.ok() && checks.host_reads()) {
        rows = 0;
        for (std::int64_t n = 0; n < call.count; ++n) rows += checkpoint_rows_of(p, span_of(call, n).length);
    }
    call.checkpoints = checks.states("checkpoints", args.checkpoints, at_least(rows), Role::output, Need::required);
}

}  // namespace

Status forward(const Plan& plan, const ForwardArgs& args, Workspace workspace, Stream stream) noexcept {
    return guarded<Status>(kName, [&]() -> Status {
        Checks checks(kName, plan, Pass::forward, workspace);
        if (!checks.ok()) return checks.status();

        ForwardCall call;
        check_inputs(checks, args, call);
        const Sizes n(call.problem);
        call.o = checks.tokens("o", args.o, {n.B, n.T, n.Hv, n.V}, one_of(call.problem.out), Role::output);
        check_states(checks, args, call);
        check_checkpoints(checks, args, call);
        checks.no_overlaps({"initial_state", "final_state"});
        if (!checks.ok()) return checks.status();

        return checks.planned().pass->run(call, checks.workspace(), stream);
    });
}

}  // namespace flashqla
