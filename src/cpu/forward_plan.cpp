// Plans and runs the chunked forward pass: which tasks exist, which threads take them, and how a long sequence with few
// heads is cut by time.
#include <algorithm>
#include <cstring>
#include <string>

#include "cpu/kernels.hpp"
#include "cpu/parallel.hpp"
#include "cpu/plans.hpp"
#include "cpu/rows.hpp"
#include "cpu/time_split.hpp"

namespace flashqla::cpu {
namespace {

// Below this many tokens a sequence goes through the token recurrence.
constexpr std::int64_t kRecurrentBelow = 5;
// State elements times tokens that make a thread worth waking: about 20 us of work.
constexpr std::int64_t kElementsPerThread = 256 << 10;
// States a task keeps at hand: half of a second-level cache of 1 MiB.
constexpr std::int64_t kStateBytes = 512 << 10;
// A cut must be into more segments than this to beat an uncut pass: it does 2.4 times the work.
constexpr double kCutCost = 3;

class ForwardPlan final : public PassPlan {
public:
    explicit ForwardPlan(const PlanRequest& request) : kernels_(kernels()), threads_(threads_of(request.options)) {
        const Problem& p = request.problem;
        sequences_ = p.sequences > 0 ? p.sequences : p.batch;
        const std::int64_t work = p.batch * p.tokens * p.heads_v * p.dim_k * p.dim_v / kElementsPerThread;
        threads_ = std::int32_t(std::clamp<std::int64_t>(work, 1, threads_));
        shape_.dim_k = p.dim_k;
        shape_.dim_v = p.dim_v;
        shape_.group = p.heads_v / p.heads_k;
        shape_.bf16_dot = kernels_.bf16_dot && p.io == DType::bf16;
        strips_ = kernels_.strips(p.dim_v);
        const std::int32_t segments = choose_tasks(p, request.options);
        split_ = TimeSplit(kernels_, p, shape_, blocks_, segments, false, workspace_);
        scratch_bytes_ =
            std::max({kernels_.forward_scratch(shape_), kernels_.recurrent_scratch(shape_), split_.scratch_bytes()});
        scratch_bytes_ = aligned_size(scratch_bytes_);
        scratch_ = workspace_.book<std::byte>("scratch of " + std::to_string(threads_) + " threads",
                                              scratch_bytes_ * std::size_t(threads_));
        rows_ = workspace_.book<std::int64_t>("first checkpoint row of each sequence",
                                              p.checkpoints == Checkpoints::none ? 0 : std::size_t(sequences_));
    }

    std::string explain() const override {
        return std::string("chunked, ") + (shape_.bf16_dot ? "bf16 dot products" : "fp32 products") + " on " +
               kernels_.name + "; " + std::to_string(threads_) + " threads over (sequence, " + std::to_string(blocks_) +
               " blocks of key heads, " + std::to_string(slices_) + " slices of values)" +
               (split_.segments() > 1
                    ? ", sequences cut into " + std::to_string(split_.segments()) + " segments with exact carry"
                    : ", sequences not cut by time");
    }

    Status run(const ForwardCall& call, std::byte* workspace, Stream) const noexcept override {
        std::int64_t* rows = rows_.count > 0 && call.checkpoints ? rows_.in(workspace) : nullptr;
        if (rows) count_checkpoint_rows(call, rows);
        if (call.checkpoints) zero_unused_checkpoints(call, rows);
        zero_unused_rows(call, threads_);
        const std::int64_t segments = split_.segments();
        if (segments > 1)
            split_.carry(call, workspace, threads_, scratch_.in(workspace), scratch_bytes_, kRecurrentBelow);
        const std::int64_t heads = blocks_;
        parallel_for(call.count * segments * heads * slices_, threads_, [&](std::int64_t i, std::int32_t thread) {
            std::byte* scratch = scratch_.in(workspace) + std::size_t(thread) * scratch_bytes_;
            const std::int64_t slice = i % slices_, block = i / slices_ % heads, part = i / slices_ / heads;
            const std::int64_t n = part / segments, segment = part % segments;
            const Slots slots = slots_of(call, n);
            if (slots.padding) return;
            const Span span = span_of(call, n);
            if (span.length < kRecurrentBelow) {
                if (slice == 0 && segment == 0) run_recurrent(call, n, span, slots, block, rows, scratch);
                return;
            }
            const Segment part_of = split_.segment(call, n, segment);
            if (part_of.span.length == 0) return;
            ForwardTask task;
            task.call = &call;
            task.shape = shape_;
            task.sequence = n;
            task.span = part_of.span;
            task.first_token = part_of.first;
            task.last = part_of.last;
            task.key_begin = std::int32_t(block) * shape_.key_heads;
            task.key_end = std::min(call.problem.heads_k, task.key_begin + shape_.key_heads);
            task.slots = slots;
            task.strip_begin = std::int32_t(slice) * shape_.slice_strips;
            task.strip_end = std::min(strips_, task.strip_begin + shape_.slice_strips);
            task.checkpoint_row = rows ? rows[n] : 0;
            task.to = task.last ? StateEnd::call : StateEnd::zeros;
            if (!part_of.last || segment > 0) {
                task.from = StateEnd::carry;
                task.carry_in = split_.start(call, workspace, n, segment);
            }
            kernels_.forward(task, scratch);
        });
        return {};
    }

private:
    // How (sequence, key head, slice of values, time segment) become tasks; returns the number of segments. A task owns
    // as many key heads as keep its states in the second-level cache; fewer when that leaves threads idle, then slices
    // of the values or, for long sequences, segments of time. Only segments change the bits.
    std::int32_t choose_tasks(const Problem& p, const PlanOptions& options) {
        const auto fills = [&](std::int64_t tasks) { return tasks >= 2 * threads_ || tasks % threads_ == 0; };
        const std::int64_t state = std::int64_t(shape_.group) * p.dim_k * p.dim_v * (shape_.bf16_dot ? 6 : 4);
        std::int32_t heads = std::int32_t(std::clamp<std::int64_t>(kStateBytes / state, 1, p.heads_k));
        const auto blocks = [&](std::int32_t h) { return (p.heads_k + h - 1) / h; };
        while (heads > 1 && !fills(sequences_ * blocks(heads))) --heads;
        shape_.key_heads = (p.heads_k + blocks(heads) - 1) / blocks(heads);  // even blocks
        blocks_ = blocks(shape_.key_heads);
        const std::int64_t busy = std::max<std::int64_t>(1, sequences_ * blocks_);
        std::int32_t slices = 1;
        while (slices < strips_ && !fills(busy * slices)) ++slices;

        std::int32_t segments = forced_segments(p, options);
        if (segments == 0) {
            // A slice repeats the preparation of the keys, about a third of a pass for a single value head; a cut
            // computes an end state and a transition besides the pass itself.
            const double prepare = 0.35 / (0.35 + 0.65 * shape_.group), slice_time = prepare + (1 - prepare) / slices;
            const std::int64_t tokens = p.sequences > 0 ? p.tokens / p.sequences : p.tokens;
            const std::int64_t cuts =
                std::clamp<std::int64_t>(std::min(threads_ / busy, tokens / kMinSegment), 1, kMaxAutomaticSegments);
            const bool cut = double(cuts) / kCutCost * slice_time > 1;
            segments = cut ? std::int32_t(cuts) : 1;
            if (cut) slices = 1;
        }
        shape_.slice_strips = (strips_ + slices - 1) / slices;
        slices_ = (strips_ + shape_.slice_strips - 1) / shape_.slice_strips;
        return segments;
    }

    void run_recurrent(const ForwardCall& call, std::int64_t n, const Span& span, const Slots& slots,
                       std::int64_t block, const std::int64_t* rows, std::byte* scratch) const {
        RecurrentTask task;
        task.inputs = &call;
        task.span = span;
        task.state_in = call.initial_state;
        task.state_out = call.final_state;
        task.slots = slots;
        task.o = call.o;
        task.forward = call.checkpoints ? &call : nullptr;
        task.row = n;
        task.checkpoint_row = rows ? rows[n] : 0;
        const std::int32_t begin = std::int32_t(block) * shape_.key_heads;
        for (std::int32_t h = begin; h < std::min(call.problem.heads_k, begin + shape_.key_heads); ++h)
            for (std::int32_t r = 0; r < shape_.group; ++r) {
                task.value_head = call.value_head(h, r);
                kernels_.recurrent(task, scratch);
            }
    }

    static void count_checkpoint_rows(const ForwardCall& call, std::int64_t* rows) {
        std::int64_t next = 0;
        for (std::int64_t n = 0; n < call.count; ++n) {
            rows[n] = next;
            next += checkpoint_count(call.problem, span_of(call, n).length);
        }
    }

    const Kernels& kernels_;
    std::int32_t threads_;
    std::int64_t sequences_ = 1;
    Shape shape_;
    std::int32_t strips_ = 1, blocks_ = 1, slices_ = 1;
    TimeSplit split_;
    std::size_t scratch_bytes_ = 0;
    Booking<std::byte> scratch_;
    Booking<std::int64_t> rows_;
};

}  // namespace

std::unique_ptr<PassPlan> plan_forward(const PlanRequest& request) { return std::make_unique<ForwardPlan>(request); }

}  // namespace flashqla::cpu
