#include "cases/runner.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "cases/grammar.hpp"
#include "cases/numbers.hpp"

namespace flashqla::cases {
namespace {

constexpr std::size_t kCanary = 256;
constexpr unsigned char kCanaryByte = 0xc5;

}  // namespace

Scratch::Scratch(std::size_t bytes, Device device) : bytes_(bytes) {
    memory_ = allocate_shared(device, bytes + 2 * kCanary);
    std::memset(memory_.get(), kCanaryByte, bytes + 2 * kCanary);
    poison();
}

Workspace Scratch::workspace() const noexcept { return {memory_.get() + kCanary, bytes_}; }

// All bits set: a NaN in every float type, -1 in every integer type.
void Scratch::poison() { std::memset(memory_.get() + kCanary, 0xff, bytes_); }

bool Scratch::intact() const {
    const auto is_canary = [](std::byte b) { return b == static_cast<std::byte>(kCanaryByte); };
    const std::byte* p = memory_.get();
    return std::all_of(p, p + kCanary, is_canary) &&
           std::all_of(p + kCanary + bytes_, p + 2 * kCanary + bytes_, is_canary);
}

Status submit(const Case& c, const Plan& plan, const Instance& instance, Workspace workspace, Stream stream) {
    switch (c.pass) {
        case Pass::forward: return forward(plan, instance.forward, workspace, stream);
        case Pass::backward: return backward(plan, instance.backward, workspace, stream);
        case Pass::decode: break;
    }
    const Status status = decode(plan, instance.decode, workspace, stream);
    if (!status.ok() || !instance.with_commit) return status;
    return commit(plan, instance.commit, workspace, stream);
}

Status call(const Case& c, const Plan& plan, Instance& instance, Workspace workspace) {
    const Status status = submit(c, plan, instance, workspace);
    return status.ok() ? finish(plan.device()) : status;
}

Execution execute(const Case& c, const Setup& setup) {
    Execution x;
    x.instance = make_instance(c, setup);
    const Result<Plan> plan =
        setup.oracle ? Plan::create(x.instance.problem, {}, {.backend = "reference"}) : plan_of(c);
    if (!plan.ok()) {
        x.status = plan.status();
        return x;
    }
    x.backend = plan->backend(c.pass);
    if (x.backend.empty()) {
        x.status =
            Status(Code::unsupported, "flashqla::Plan: this pass was not planned for this problem\n" + plan->explain());
        return x;
    }
    x.workspace_bytes = plan->workspace_bytes(c.pass);
    const Scratch scratch(x.workspace_bytes, plan->device());
    x.status = call(c, plan.value(), x.instance, scratch.workspace());
    x.faults = x.instance.forbidden_changes();
    if (!scratch.intact()) x.faults.push_back("memory outside the workspace was written");
    if (c.pass == Pass::forward && c.checkpoints != Checkpoints::none && c.checkpoints != Checkpoints::listed) {
        const std::int64_t needed = x.instance.forward.checkpoints.shape[0];
        if (plan->checkpoint_rows() > needed) {
            x.faults.push_back("Plan::checkpoint_rows() is " + std::to_string(plan->checkpoint_rows()) +
                               ", the bound that follows from the sizes is " + std::to_string(needed));
        }
    }
    return x;
}

std::shared_ptr<const Oracle> ask_oracle(const Case& c) {
    auto oracle = std::make_shared<Oracle>();
    Execution x = execute(c, {.oracle = true, .origins = {}, .start = {}});
    oracle->status = x.status;
    if (!x.status.ok()) return oracle;
    for (const std::string& name : x.instance.outputs) {
        oracle->outputs[name].values = values_of(*x.instance.find(name));
    }
    return oracle;
}

double Report::worst_rel_l2() const {
    double worst = 0;
    for (const OutputError& output : outputs) {
        for (const HeadError& head : output.heads) worst = std::max(worst, head.rel_l2);
    }
    return worst;
}

Report check_case(const Case& c, std::shared_ptr<const Oracle> oracle) {
    Report report;
    report.tested = c;
    Execution x = execute(c);
    report.backend = x.backend;
    report.workspace_bytes = x.workspace_bytes;
    report.faults = x.faults;
    report.message = x.status.message();
    if (c.expect != Expect::ok) {
        // What index tensors hold on a GPU is out of the host's sight: taken as padding or undefined, never refused.
        if (c.device.type == DeviceType::cuda && c.expect == Expect::invalid && x.status.ok()) {
            report.message = "the host refuses this by the content of an index tensor, which it does not see on a GPU";
            report.verdict = report.faults.empty() ? Verdict::unsupported : Verdict::failed;
            return report;
        }
        const Code wanted = c.expect == Expect::invalid ? Code::invalid_argument : Code::unsupported;
        if (x.status.code() != wanted) {
            report.faults.push_back(std::string("a refusal was expected (") +
                                    (c.expect == Expect::invalid ? "invalid" : "unsupported") + "), but " +
                                    (x.status.ok() ? "the call succeeded" : "the call says: " + x.status.message()));
        }
        report.verdict = report.faults.empty() ? Verdict::passed : Verdict::failed;
        return report;
    }
    if (!x.status.ok()) {
        report.verdict = x.status.code() == Code::unsupported ? Verdict::unsupported : Verdict::failed;
        if (report.verdict == Verdict::failed) report.faults.push_back("the call was refused: " + report.message);
        return report;
    }
    if (!oracle) oracle = ask_oracle(c);
    if (!oracle->status.ok()) {
        report.faults.push_back("the oracle refused: " + oracle->status.message());
        report.verdict = Verdict::failed;
        return report;
    }
    std::vector<bool> padding_rows;
    for (const Row& row : x.instance.rows) padding_rows.push_back(row.sequence < 0);
    for (const std::string& name : x.instance.outputs) {
        report.outputs.push_back(compare(c, *x.instance.find(name), oracle->outputs.at(name), padding_rows));
    }
    for (const std::string& fault : check_properties(c, x)) report.faults.push_back(fault);
    const bool values = std::all_of(report.outputs.begin(), report.outputs.end(),
                                    [](const OutputError& output) { return output.passed(); });
    report.verdict = values && report.faults.empty() ? Verdict::passed : Verdict::failed;
    return report;
}

std::string text_of(const Report& report, bool verbose) {
    char line[512];
    const std::string text = to_line(report.tested);
    const char* words[] = {"ok  ", "FAIL", "n/a "};
    std::snprintf(line, sizeof line, "%s %s", words[static_cast<int>(report.verdict)], text.substr(0, 400).c_str());
    std::string all = line;
    if (report.verdict == Verdict::unsupported) return all + "\n     " + report.message + "\n";
    if (!report.outputs.empty()) {
        std::snprintf(line, sizeof line, "  [%s, rel L2 %.2e]", report.backend.c_str(), report.worst_rel_l2());
        all += line;
    }
    all += "\n";
    for (const OutputError& output : report.outputs) {
        if (output.passed() && !verbose) continue;
        const HeadError& w = output.whole;
        std::snprintf(
            line, sizeof line,
            "     %-19s whole   rel L2 %.3e (allowed %.2e)  max abs %.3e  max rel %.3e  rms %.3e  worst %s%s\n",
            output.name.c_str(), w.rel_l2, output.tolerance.whole, w.max_abs, w.max_rel, w.rms, w.worst.c_str(),
            w.passed ? "" : "  <- too large");
        all += line;
        for (const std::string& fault : output.faults) all += "     " + fault + "\n";
        for (std::size_t h = 0; h < output.heads.size(); ++h) {
            const HeadError& head = output.heads[h];
            if (head.passed && !verbose) continue;
            std::snprintf(line, sizeof line,
                          "     %-19s head %-3zu rel L2 %.3e (allowed %.2e)  max abs %.3e  max rel %.3e  rms %.3e  "
                          "worst %s%s\n",
                          output.name.c_str(), h, head.rel_l2, output.tolerance.per_head, head.max_abs, head.max_rel,
                          head.rms, head.worst.c_str(), head.passed ? "" : "  <- too large");
            all += line;
        }
    }
    for (const std::string& fault : report.faults) all += "     " + fault + "\n";
    if (report.verdict == Verdict::failed) {
        all += std::string("     flashqla check ") +
               (report.tested.device.type == DeviceType::cuda ? "--device cuda " : "") + "'" + text + "'\n";
    }
    return all;
}

}  // namespace flashqla::cases
