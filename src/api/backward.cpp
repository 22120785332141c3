// flashqla::backward: check the arguments against the plan, then run the chosen backend.
#include "api/guard.hpp"
#include "api/inputs.hpp"

namespace flashqla {
namespace {

constexpr const char* kName = "flashqla::backward";

void check_gradients(Checks& checks, const BackwardArgs& args, BackwardCall& call) {
    const Sizes n(call.problem);
    const auto out = Role::output;
    const auto optional = Need::optional;
    call.d_o = checks.tokens("d_o", args.d_o, {n.B, n.T, n.Hv, n.V}, kFloats, Role::input, optional);
    call.d_final_state = checks.states("d_final_state", args.d_final_state, n.N, Role::input);

    call.d_q = checks.tokens("d_q", args.d_q, {n.B, n.T, n.Hk, n.K}, kFloats, out, optional);
    call.d_k = checks.tokens("d_k", args.d_k, {n.B, n.T, n.Hk, n.K}, kFloats, out, optional);
    call.d_v = checks.tokens("d_v", args.d_v, {n.B, n.T, n.Hv, n.V}, kFloats, out, optional);
    call.d_g = checks.tokens("d_g", args.d_g, {n.B, n.T, n.Hv}, kFloats, out, optional);
    call.d_beta = checks.tokens("d_beta", args.d_beta, {n.B, n.T, n.Hv}, kFloats, out, optional);
    call.d_A_log = checks.heads("d_A_log", args.d_A_log, out);
    call.d_dt_bias = checks.heads("d_dt_bias", args.d_dt_bias, out);
    call.d_initial_state = checks.states("d_initial_state", args.d_initial_state, n.N, out);

    // A gradient needs its argument. (Without an initial state its gradient still exists: zeros were the start.)
    if (!args.g.given()) checks.unused("d_g", args.d_g, "g is not");
    if (!args.beta.given()) checks.unused("d_beta", args.d_beta, "beta is not");
    if (!args.A_log.given()) checks.unused("d_A_log", args.d_A_log, "A_log is not");
    if (!args.dt_bias.given()) checks.unused("d_dt_bias", args.d_dt_bias, "dt_bias is not");
}

}  // namespace

Status backward(const Plan& plan, const BackwardArgs& args, Workspace workspace, Stream stream) noexcept {
    return guarded<Status>(kName, [&]() -> Status {
        Checks checks(kName, plan, Pass::backward, workspace);
        if (!checks.ok()) return checks.status();

        BackwardCall call;
        check_inputs(checks, args, call);
        call.initial_state = checks.states("initial_state", args.initial_state, call.count, Role::input);
        check_gradients(checks, args, call);
        checks.no_overlaps();
        if (!checks.ok()) return checks.status();

        return checks.planned().pass->run(call, checks.workspace(), stream);
    });
}

}  // namespace flashqla
