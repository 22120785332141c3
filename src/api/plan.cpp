// Plan::create: validate, walk the candidate list for each pass, book the workspace.
#include "api/plan.hpp"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "api/backends.hpp"
#include "api/guard.hpp"
#include "api/problem.hpp"
#include "api/text.hpp"

namespace flashqla {

const Status kOutOfMemory(Code::out_of_memory,
                          "flashqla: the memory for a plan or for an error sentence could not be allocated");

namespace {

constexpr const char* kName = "flashqla::Plan::create";

std::string refusals_text(const std::vector<Refusal>& refusals) {
    std::string text;
    for (const Refusal& refusal : refusals) {
        text += say(text.empty() ? "" : "; ", refusal.backend, ": ", refusal.reason);
    }
    return text;
}

Status choose_forced_backend(Plan::Impl& plan) {
    plan.forced = plan.options.backend;
    plan.forced_by = "PlanOptions::backend";
    if (plan.forced.empty()) {
        const char* variable = std::getenv("FQLA_FORCE_BACKEND");
        plan.forced = variable ? variable : "";
        plan.forced_by = "FQLA_FORCE_BACKEND";
    }
    const auto list = backends();
    const auto is_forced = [&](const Backend* backend) { return plan.forced == backend->name; };
    if (plan.forced.empty() || std::any_of(list.begin(), list.end(), is_forced)) return {};
    return {Code::invalid_argument, say(kName, ": ", plan.forced_by, " asks for the backend '", plan.forced,
                                        "'; this build has ", backend_names())};
}

// An empty reason means that the backend takes the pass.
std::string refusal_of(const Plan::Impl& plan, const Backend& backend, const PlanRequest& request) {
    if (!plan.forced.empty() && plan.forced != backend.name) {
        return say("not considered, ", plan.forced_by, " asks for ", plan.forced);
    }
    if (backend.device != plan.device.type) {
        return say("runs on ", backend.device == DeviceType::cpu ? "cpu" : "cuda", ", the plan is for ",
                   name_of(plan.device));
    }
    return backend.supports(request).reason;
}

// Room for every slot that one call may write. Only where the host can read them.
std::size_t slot_check_count(const Problem& problem, Device device, Pass pass) noexcept {
    const std::int64_t rows = sequence_count(problem);
    if (pass == Pass::backward || device.type != DeviceType::cpu) return 0;
    if (pass == Pass::forward) return static_cast<std::size_t>(rows);
    return static_cast<std::size_t>(rows * std::max<std::int64_t>(1, decode_tokens(problem)));
}

// `function` is who will say it when no backend takes the pass.
Status plan_pass(Plan::Impl& plan, Pass pass, const char* function = kName) {
    PlannedPass& planned = plan.of(pass);
    const PlanRequest request{plan.problem, plan.device, plan.options, pass};
    for (const Backend* backend : backends()) {
        std::string reason = refusal_of(plan, *backend, request);
        if (!reason.empty()) {
            planned.refusals.push_back({backend->name, std::move(reason)});
            continue;
        }
        planned.pass = backend->plan(request);
        if (!planned.pass) {
            return {Code::internal,
                    say(kName, ": the backend ", backend->name, " made no plan for the ", name_of(pass), " pass")};
        }
        planned.backend = backend;
        planned.slot_check = {planned.pass->workspace().bytes(), slot_check_count(plan.problem, plan.device, pass)};
        const std::size_t end = planned.slot_check.offset + planned.slot_check.count * sizeof(std::int64_t);
        planned.workspace_bytes = (end + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
        return {};
    }
    return {Code::unsupported, say(function, ": no backend can do the ", name_of(pass), " pass of this problem (",
                                   refusals_text(planned.refusals), ")")};
}

Result<std::shared_ptr<const Plan::Impl>> make_plan(const Problem& problem, Device device, const PlanOptions& options) {
    if (Status status = validate(problem, device, options); !status.ok()) return status;

    auto plan = std::make_shared<Plan::Impl>();
    plan->problem = with_defaults(problem);
    plan->device = device;
    plan->options = options;
    if (Status status = choose_forced_backend(*plan); !status.ok()) return status;

    if (Status status = plan_pass(*plan, Pass::forward); !status.ok()) return status;
    if (problem.for_backward) {
        if (Status status = plan_pass(*plan, Pass::backward); !status.ok()) return status;
    } else {
        plan->of(Pass::backward).missing = {
            Code::invalid_argument,
            "flashqla::backward: this plan has no backward pass; set Problem::for_backward when it is made"};
    }
    // decode() is offered whenever rows can be short. That no backend takes it must not spoil the forward pass.
    if (can_decode(plan->problem)) {
        plan->of(Pass::decode).missing = plan_pass(*plan, Pass::decode, "flashqla::decode");
    } else {
        plan->of(Pass::decode).missing = {
            Code::invalid_argument, say("flashqla::decode: this plan has no decode pass; rows have ", problem.tokens,
                                        " tokens, and decode takes at most ", kMaxDecodeTokens)};
    }
    return std::shared_ptr<const Plan::Impl>(std::move(plan));
}

}  // namespace

Result<Plan> Plan::create(const Problem& problem, Device device, const PlanOptions& options) noexcept {
    return guarded<Result<Plan>>(kName, [&]() -> Result<Plan> {
        auto made = make_plan(problem, device, options);
        if (!made.ok()) return made.status();
        Plan plan;
        plan.impl_ = std::move(made).value();
        return plan;
    });
}

const Problem& Plan::problem() const noexcept {
    static const Problem empty;
    return impl_ ? impl_->problem : empty;
}

Device Plan::device() const noexcept { return impl_ ? impl_->device : Device{}; }

std::string_view Plan::backend(Pass pass) const noexcept {
    if (!impl_ || static_cast<std::size_t>(pass) >= impl_->passes.size()) return {};
    const Backend* backend = impl_->of(pass).backend;
    return backend ? backend->name : std::string_view{};
}

std::size_t Plan::workspace_bytes(Pass pass) const noexcept {
    if (!impl_ || static_cast<std::size_t>(pass) >= impl_->passes.size()) return 0;
    return impl_->of(pass).workspace_bytes;
}

std::int64_t Plan::checkpoint_rows() const noexcept { return impl_ ? checkpoint_bound(impl_->problem) : 0; }

}  // namespace flashqla
