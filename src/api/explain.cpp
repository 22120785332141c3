// Plan::explain: the problem, then for each pass the choice, what refused it, and the workspace.
#include <sstream>

#include "api/guard.hpp"
#include "api/plan.hpp"
#include "api/problem.hpp"
#include "api/text.hpp"

namespace flashqla {
namespace {

const char* yes_no(bool value) noexcept { return value ? "yes" : "no"; }

const char* gate_text(Gate gate) noexcept {
    switch (gate) {
        case Gate::none: return "none";
        case Gate::log: return "log";
        case Gate::raw: return "raw";
        case Gate::vector: return "vector";
    }
    return "unknown";
}

std::string checkpoints_text(const Problem& p) {
    switch (p.checkpoints) {
        case Checkpoints::none: return "none";
        case Checkpoints::chunk_starts: return say("at chunk starts, at most ", checkpoint_bound(p), " rows");
        case Checkpoints::every_n: {
            return say("every ", p.checkpoint_every, " tokens, at most ", checkpoint_bound(p), " rows");
        }
        case Checkpoints::listed: return "listed, a row for each entry of checkpoint_list";
    }
    return "unknown";
}

void write_problem(std::ostream& out, const Plan::Impl& plan) {
    const Problem& p = plan.problem;
    out << "problem   ";
    if (packed(p)) {
        out << p.sequences << " packed sequences in " << p.tokens << " tokens";
        if (p.decode_rows > 0) out << ", the first " << p.decode_rows << " of them short";
    } else {
        out << p.batch << " x " << p.tokens << " tokens";
    }
    out << ", heads " << p.heads_k << "/" << p.heads_v << ", K " << p.dim_k << ", V " << p.dim_v << ", q k v "
        << name_of(p.io) << ", o " << name_of(p.out) << '\n';
    out << "rule      gate " << gate_text(p.gate) << ", beta " << (p.beta_mode == BetaMode::value ? "value" : "logit")
        << " x " << p.beta_factor << ", scale " << p.scale << ", qk l2norm ";
    if (p.qk_l2norm) {
        out << "with eps " << p.l2norm_eps;
    } else {
        out << "no";
    }
    out << ", grouping " << (p.grouping == Grouping::interleaved ? "interleaved" : "tiled") << '\n';
    out << "states    layout " << (p.state_layout == StateLayout::kv ? "kv" : "vk") << ", padding slots "
        << (p.pad_rule == PadRule::negative ? "< 0" : "<= 0") << ", checkpoints " << checkpoints_text(p) << '\n';
    out << "options   device " << name_of(plan.device) << ", threads ";
    if (plan.options.threads > 0) {
        out << plan.options.threads;
    } else {
        out << "automatic";
    }
    out << ", context split ";
    if (plan.options.context_split > 0) {
        out << plan.options.context_split;
    } else {
        out << "automatic";
    }
    out << ", deterministic " << yes_no(plan.options.deterministic) << ", batch invariant "
        << yes_no(plan.options.batch_invariant);
    if (!plan.forced.empty()) out << ", backend " << plan.forced << " by " << plan.forced_by;
    out << '\n';
}

void write_indented(std::ostream& out, const std::string& text) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) out << "  " << line << '\n';
}

void write_pass(std::ostream& out, const PlannedPass& planned, Pass pass) {
    const std::string name = name_of(pass);
    out << name << std::string(10 - name.size(), ' ');
    if (planned.backend == nullptr) {
        out << "not planned: " << planned.missing.message() << '\n';
        return;
    }
    out << planned.backend->name << '\n';
    write_indented(out, planned.pass->explain());
    for (const Refusal& refusal : planned.refusals)
        out << "  not " << refusal.backend << ": " << refusal.reason << '\n';
    out << "  workspace " << planned.workspace_bytes << " bytes (offset + bytes, name)\n";
    std::string map = planned.pass->workspace().map();
    if (planned.slot_check.count > 0) {
        const std::size_t bytes = planned.workspace_bytes - planned.slot_check.offset;
        map += say(map.empty() ? "" : "\n", planned.slot_check.offset, " + ", bytes, "  slot check");
    }
    std::istringstream lines(map);
    for (std::string line; std::getline(lines, line);) out << "    " << line << '\n';
}

}  // namespace

std::string Plan::explain() const {
    if (!impl_) return "an empty plan; make one with Plan::create\n";
    std::ostringstream out;
    write_problem(out, *impl_);
    for (const Pass pass : {Pass::forward, Pass::backward, Pass::decode}) write_pass(out, impl_->of(pass), pass);
    return out.str();
}

}  // namespace flashqla
