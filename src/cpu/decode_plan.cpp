// Plans and runs decode and verification: one task a (row, value head), states in place.
#include <algorithm>
#include <string>

#include "cpu/kernels.hpp"
#include "cpu/parallel.hpp"
#include "cpu/plans.hpp"
#include "cpu/rows.hpp"

namespace flashqla::cpu {
namespace {

// State elements that make a thread worth waking: about 4 us of work.
constexpr std::int64_t kElementsPerThread = 40 << 10;

class DecodePlan final : public PassPlan {
public:
    explicit DecodePlan(const PlanRequest& request) : kernels_(kernels()), threads_(threads_of(request.options)) {
        const Problem& p = request.problem;
        Shape shape;
        shape.dim_k = p.dim_k;
        shape.dim_v = p.dim_v;
        // Waking a thread costs some microseconds; a state element costs about 0.1 ns.
        const std::int64_t rows = p.sequences > 0 ? std::max(p.sequences, p.tokens) : p.batch * p.tokens;
        threads_ = std::int32_t(
            std::clamp<std::int64_t>(rows * p.heads_v * p.dim_k * p.dim_v / kElementsPerThread, 1, threads_));
        scratch_bytes_ = kernels_.recurrent_scratch(shape);
        scratch_ = workspace_.book<std::byte>("scratch of " + std::to_string(threads_) + " threads",
                                              scratch_bytes_ * std::size_t(threads_));
    }

    std::string explain() const override {
        return std::string("token recurrence on ") + kernels_.name + "; " + std::to_string(threads_) +
               " threads over (row, value head); one token with one state type is updated in place";
    }

    Status run(const DecodeCall& call, std::byte* workspace, Stream) const noexcept override {
        zero_unused_rows(call, threads_);
        parallel_ranges(call.count * call.problem.heads_v, threads_,
                        [&](std::int64_t begin, std::int64_t end, std::int32_t thread) {
                            for (std::int64_t i = begin; i < end; ++i)
                                run_task(call, i, i + 1 < end,
                                         scratch_.in(workspace) + std::size_t(thread) * scratch_bytes_);
                        });
        return {};
    }

private:
    // NOTE: only states of this thread's own range are asked for ahead: a line fetched from another core has to travel
    // back.
    void run_task(const DecodeCall& call, std::int64_t i, bool prefetch, std::byte* scratch) const {
        const std::int64_t heads = call.problem.heads_v;
        RecurrentTask task;
        task.row = i / heads;
        task.slots = slots_of(call, task.row);
        if (task.slots.padding) return;
        task.inputs = &call;
        task.span = span_of(call, task.row);
        task.value_head = std::int32_t(i % heads);
        task.state_in = task.state_out = call.state;
        task.o = call.o;
        task.decode = &call;
        if (task.span.length == 0 && task.slots.read == task.slots.write) return;
        if (prefetch) task.next_state = next_state(call, i + 1);
        kernels_.recurrent(task, scratch);
    }

    // The state that task i starts from; null for padding rows.
    static const void* next_state(const DecodeCall& call, std::int64_t i) {
        const std::int64_t heads = call.problem.heads_v;
        const Slots slots = slots_of(call, i / heads);
        if (slots.read < 0) return nullptr;
        return static_cast<const std::byte*>(call.state.data) +
               call.state.offset(slots.read, i % heads) * std::int64_t(size_of(call.state.dtype));
    }

    const Kernels& kernels_;
    std::int32_t threads_;
    std::size_t scratch_bytes_ = 0;
    Booking<std::byte> scratch_;
};

}  // namespace

std::unique_ptr<PassPlan> plan_decode(const PlanRequest& request) { return std::make_unique<DecodePlan>(request); }

}  // namespace flashqla::cpu
