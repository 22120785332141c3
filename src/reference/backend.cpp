#include "reference/recurrence.hpp"
#include "reference/reference.hpp"

namespace flashqla {
namespace {

class ReferencePlan final : public PassPlan {
public:
    explicit ReferencePlan(const PlanRequest& request) {
        const Problem& p = request.problem;
        const std::size_t K = p.dim_k, V = p.dim_v, heads = p.heads_v, T = std::max<std::int64_t>(p.tokens, 1);
        const bool backward = request.pass == Pass::backward;
        if (request.pass == Pass::decode) segment_ = kMaxDecodeTokens;
        if (backward) segment_ = static_cast<std::int64_t>(std::ceil(std::sqrt(static_cast<double>(T))));
        const std::size_t kept = request.pass == Pass::forward ? 1 : segment_ + 1;
        token_ = workspace_.book<double>("one token", reference::Token::doubles(p));
        states_ = workspace_.book<double>("states [" + std::to_string(kept) + ",K,V]", kept * K * V);
        if (!backward) return;
        starts_ = workspace_.book<double>("states at segment starts [T/segment,K,V]", (T / segment_ + 1) * K * V);
        d_state_ = workspace_.book<double>("d_state [K,V]", K * V);
        d_q_ = workspace_.book<double>("d_q of a key head [T,K]", T * K);
        d_k_ = workspace_.book<double>("d_k of a key head [T,K]", T * K);
        d_A_log_ = workspace_.book<double>("d_A_log [Hv]", heads);
        d_dt_bias_ = workspace_.book<double>("d_dt_bias [Hv]", heads);
    }

    std::string explain() const override {
        const std::string text = "token by token in double, one thread";
        return starts_.count == 0 ? text : text + "; states kept every " + std::to_string(segment_) + " tokens";
    }

    Status run(const ForwardCall& call, std::byte* workspace, Stream) const noexcept override {
        return reference::forward(call, scratch(workspace));
    }
    Status run(const BackwardCall& call, std::byte* workspace, Stream) const noexcept override {
        return reference::backward(call, scratch(workspace));
    }
    Status run(const DecodeCall& call, std::byte* workspace, Stream) const noexcept override {
        return reference::decode(call, scratch(workspace));
    }

private:
    reference::Scratch scratch(std::byte* at) const noexcept {
        return {token_.in(at), states_.in(at), segment_,        starts_.in(at),   d_state_.in(at),
                d_q_.in(at),   d_k_.in(at),    d_A_log_.in(at), d_dt_bias_.in(at)};
    }

    std::int64_t segment_ = 1;
    Booking<double> token_, states_, starts_, d_state_, d_q_, d_k_, d_A_log_, d_dt_bias_;
};

Support supports(const PlanRequest& request) {
    if (request.device.type != DeviceType::cpu) return {"reference runs on the CPU only"};
    if (request.problem.gate == Gate::vector) return {"reference has no gate per key channel (Gate::vector) yet"};
    return {};
}

std::unique_ptr<PassPlan> plan(const PlanRequest& request) { return std::make_unique<ReferencePlan>(request); }
std::string info() { return "token recurrence in double, one thread"; }

}  // namespace

const Backend kReferenceBackend{"reference", DeviceType::cpu, supports, plan, info};

}  // namespace flashqla
