// Plans and runs the backward pass: one task a (sequence, key head), so that the gradients of a key head are summed
// over its value heads in one place, in a fixed order and in fp32.
#include <algorithm>
#include <string>

#include "base/float16.hpp"
#include "cpu/kernels.hpp"
#include "cpu/parallel.hpp"
#include "cpu/plans.hpp"
#include "cpu/rows.hpp"
#include "cpu/time_split.hpp"

namespace flashqla::cpu {
namespace {

class BackwardPlan final : public PassPlan {
public:
    explicit BackwardPlan(const PlanRequest& request) : kernels_(kernels()), threads_(threads_of(request.options)) {
        const Problem& p = request.problem;
        sequences_ = p.sequences > 0 ? p.sequences : p.batch;
        shape_.dim_k = p.dim_k;
        shape_.dim_v = p.dim_v;
        shape_.group = p.heads_v / p.heads_k;
        shape_.bf16_dot = kernels_.bf16_dot && p.io == DType::bf16;
        const std::int32_t segments = choose_segments(p, request.options);
        threads_ = std::int32_t(std::clamp<std::int64_t>(sequences_ * p.heads_k * segments, 1, threads_));
        Shape exact = shape_;  // what is carried from segment to segment takes part in every later product
        exact.bf16_dot = false;
        split_ = TimeSplit(kernels_, p, exact, p.heads_k, segments, true, workspace_);
        tokens_ = segments == 1 ? p.tokens : most_tokens(p.tokens, segments);
        scratch_bytes_ = std::max(kernels_.backward_scratch(shape_, tokens_), split_.scratch_bytes());
        scratch_bytes_ = aligned_size(scratch_bytes_);
        scratch_ =
            workspace_.book<std::byte>("states, deltas and gradients of " + std::to_string(threads_) + " threads",
                                       scratch_bytes_ * std::size_t(threads_));
        if (p.gate == Gate::raw) {
            const std::size_t partials = std::size_t(sequences_) * std::size_t(segments) * std::size_t(p.heads_v);
            d_A_log_ = workspace_.book<double>("d_A_log of each segment [N,segments,Hv]", partials);
            d_dt_bias_ = workspace_.book<double>("d_dt_bias of each segment [N,segments,Hv]", partials);
        }
    }

    std::string explain() const override {
        return std::string("chunked, ") + (shape_.bf16_dot ? "bf16 dot products" : "fp32 products") + " on " +
               kernels_.name + "; states recomputed and kept per chunk; " + std::to_string(threads_) +
               " threads over (sequence, key head)" +
               (split_.segments() > 1 ? ", sequences cut into " + std::to_string(split_.segments()) +
                                            " segments with exact carry of states and adjoints"
                                      : ", sequences not cut by time");
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
        const std::int64_t segments = split_.segments();
        const auto run_task = [&](std::int64_t n, std::int64_t index, std::int64_t key_head, std::int32_t thread,
                                  bool adjoint_only) {
            const Segment segment = split_.segment(call, n, index);
            if (segment.span.length == 0 && index > 0) return;
            BackwardTask task;
            task.call = &call;
            task.shape = shape_;
            task.sequence = n;
            task.key_head = std::int32_t(key_head);
            task.span = segment.span;
            task.scratch_tokens = tokens_;
            task.first = index == 0;
            task.last = segment.last;
            if (!task.first) task.carry_in = split_.start(call, workspace, n, index);
            if (adjoint_only)
                task.adjoint_out = split_.adjoint(call, workspace, n, index);
            else if (!task.last)
                task.adjoint_in = split_.adjoint(call, workspace, n, index + 1);
            if (d_A_log && !adjoint_only) {
                task.d_A_log = d_A_log + (n * segments + index) * p.heads_v;
                task.d_dt_bias = d_dt_bias + (n * segments + index) * p.heads_v;
            }
            kernels_.backward(task, scratch_.in(workspace) + std::size_t(thread) * scratch_bytes_);
        };
        if (segments > 1) {
            ForwardCall forward;
            static_cast<Inputs&>(forward) = call;
            forward.initial_state = call.initial_state;
            split_.carry(forward, workspace, threads_, scratch_.in(workspace), scratch_bytes_, 0);
            const std::int64_t cuts = segments - 1;
            parallel_for(call.count * cuts * p.heads_k, threads_, [&](std::int64_t i, std::int32_t thread) {
                const std::int64_t part = i / p.heads_k;
                run_task(part / cuts, part % cuts + 1, i % p.heads_k, thread, true);
            });
            split_.join_back(call, workspace, threads_);
        }
        parallel_for(call.count * segments * p.heads_k, threads_, [&](std::int64_t i, std::int32_t thread) {
            const std::int64_t part = i / p.heads_k;
            run_task(part / segments, part % segments, i % p.heads_k, thread, false);
        });
        sum_over_segments(call, call.count * segments, d_A_log, call.d_A_log);
        sum_over_segments(call, call.count * segments, d_dt_bias, call.d_dt_bias);
        return {};
    }

private:
    // The split computes transitions and D* besides, 2.5 passes for one, so it pays only when most threads would idle.
    std::int32_t choose_segments(const Problem& p, const PlanOptions& options) const {
        if (const std::int32_t forced = forced_segments(p, options)) return forced;
        const std::int64_t busy = std::max<std::int64_t>(1, sequences_ * p.heads_k);
        if (busy * 4 > threads_) return 1;
        const std::int64_t tokens = p.sequences > 0 ? p.tokens / p.sequences : p.tokens;
        return std::int32_t(
            std::clamp<std::int64_t>(std::min(threads_ / busy, tokens / kMinSegment), 1, kMaxAutomaticSegments));
    }

    // Tokens of the longest segment of a sequence of any length up to `tokens`.
    static std::int64_t most_tokens(std::int64_t tokens, std::int64_t segments) {
        return std::min(tokens, (tokens / segments + kChunk - 1) / kChunk * kChunk + kChunk * segments);
    }

    static void sum_over_segments(const BackwardCall& call, std::int64_t count, const double* parts,
                                  const HeadRef& to) {
        if (!to) return;
        for (std::int64_t h = 0; h < call.problem.heads_v; ++h) {
            double sum = 0.0;
            for (std::int64_t part = 0; parts && part < count; ++part) sum += parts[part * call.problem.heads_v + h];
            store_float(to.data, to.dtype, h * to.stride, static_cast<float>(sum));
        }
    }

    const Kernels& kernels_;
    std::int32_t threads_;
    std::int64_t sequences_ = 1, tokens_ = 0;
    Shape shape_;
    TimeSplit split_;
    std::size_t scratch_bytes_ = 0;
    Booking<std::byte> scratch_;
    Booking<double> d_A_log_, d_dt_bias_;
};

}  // namespace

std::unique_ptr<PassPlan> plan_backward(const PlanRequest& request) { return std::make_unique<BackwardPlan>(request); }

}  // namespace flashqla::cpu
