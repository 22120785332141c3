// Plans and runs the backward pass: one task a (sequence, key head), so that the gradients of a key head are summed
// over its value heads in one place, in a fixed order and in fp32.
#include <algorithm>
#include <string>

#include "base/float16.hpp"
#include "cpu/kernels.hpp"
#include "cpu/parallel.hpp"
#include "cpu/plans.hpp"
#include "cpu/rows.hpp"

namespace flashqla::cpu {
namespace {

class BackwardPlan final : public PassPlan {
public:
    explicit BackwardPlan(const PlanRequest& request) : kernels_(kernels()), threads_(threads_of(request.options)) {
        const Problem& p = request.problem;
        sequences_ = p.sequences > 0 ? p.sequences : p.batch;
        threads_ = std::int32_t(std::clamp<std::int64_t>(sequences_ * p.heads_k, 1, threads_));
        shape_.dim_k = p.dim_k;
        shape_.dim_v = p.dim_v;
        shape_.group = p.heads_v / p.heads_k;
        tokens_ = p.tokens;
        scratch_bytes_ = kernels_.backward_scratch(shape_, tokens_);
        scratch_ =
            workspace_.book<std::byte>("states, deltas and gradients of " + std::to_string(threads_) + " threads",
                                       scratch_bytes_ * std::size_t(threads_));
        if (p.gate == Gate::raw) {
            const std::size_t partials = std::size_t(sequences_) * std::size_t(p.heads_v);
            d_A_log_ = workspace_.book<double>("d_A_log of each sequence [N,Hv]", partials);
            d_dt_bias_ = workspace_.book<double>("d_dt_bias of each sequence [N,Hv]", partials);
        }
    }

    std::string explain() const override {
        return std::string("chunked, fp32 products on ") + kernels_.name + "; states recomputed and kept per chunk; " +
               std::to_string(threads_) + " threads over (sequence, key head)";
    }

    Status run(const BackwardCall& call, std::byte* workspace, Stream) const noexcept override {
        const Problem& p = call.problem;
        zero_tail(call, call.d_q, p.heads_k, p.dim_k, threads_);
        zero_tail(call, call.d_k, p.heads_k, p.dim_k, threads_);
        zero_tail(call, call.d_v, p.heads_v, p.dim_v, threads_);
        zero_tail(call, call.d_g, p.heads_v, 1, threads_);
        zero_tail(call, call.d_beta, p.heads_v, 1, threads_);
        double* d_A_log = d_A_log_.count ? d_A_log_.in(workspace) : nullptr;
        double* d_dt_bias = d_dt_bias_.count ? d_dt_bias_.in(workspace) : nullptr;
        std::fill_n(d_A_log, d_A_log_.count, 0.0);
        std::fill_n(d_dt_bias, d_dt_bias_.count, 0.0);
        parallel_for(call.count * p.heads_k, threads_, [&](std::int64_t i, std::int32_t thread) {
            BackwardTask task;
            task.call = &call;
            task.shape = shape_;
            task.sequence = i / p.heads_k;
            task.key_head = std::int32_t(i % p.heads_k);
            task.span = span_of(call, task.sequence);
            task.scratch_tokens = tokens_;
            if (d_A_log) {
                task.d_A_log = d_A_log + task.sequence * p.heads_v;
                task.d_dt_bias = d_dt_bias + task.sequence * p.heads_v;
            }
            kernels_.backward(task, scratch_.in(workspace) + std::size_t(thread) * scratch_bytes_);
        });
        sum_over_sequences(call, d_A_log, call.d_A_log);
        sum_over_sequences(call, d_dt_bias, call.d_dt_bias);
        return {};
    }

private:
    static void sum_over_sequences(const BackwardCall& call, const double* parts, const HeadRef& to) {
        if (!to) return;
        for (std::int64_t h = 0; h < call.problem.heads_v; ++h) {
            double sum = 0.0;
            for (std::int64_t n = 0; parts && n < call.count; ++n) sum += parts[n * call.problem.heads_v + h];
            store_float(to.data, to.dtype, h * to.stride, static_cast<float>(sum));
        }
    }

    const Kernels& kernels_;
    std::int32_t threads_;
    std::int64_t sequences_ = 1, tokens_ = 0;
    Shape shape_;
    std::size_t scratch_bytes_ = 0;
    Booking<std::byte> scratch_;
    Booking<double> d_A_log_, d_dt_bias_;
};

}  // namespace

std::unique_ptr<PassPlan> plan_backward(const PlanRequest& request) { return std::make_unique<BackwardPlan>(request); }

}  // namespace flashqla::cpu
