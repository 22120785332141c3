// Plans and runs the chunked forward pass: which tasks exist, which threads take them, and how a long sequence with few
// heads is cut by time.
#include <algorithm>
#include <cstring>
#include <string>

#include "base/float16.hpp"
#include "cpu/kernels.hpp"
#include "cpu/parallel.hpp"
#include "cpu/plans.hpp"
#include "cpu/rows.hpp"

namespace flashqla::cpu {
namespace {

// Below this many tokens a sequence goes through the token recurrence.
constexpr std::int64_t kRecurrentBelow = 5;
// State elements times tokens that make a thread worth waking: about 20 us of work.
constexpr std::int64_t kElementsPerThread = 256 << 10;
// States a task keeps at hand: half of a second-level cache of 1 MiB.
constexpr std::int64_t kStateBytes = 512 << 10;
// A segment of a split sequence is at least this long: computing its transition costs about as much as 1.3 passes.
constexpr std::int64_t kMinSegment = 512;

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
        strips_ = strips(p.dim_v);
        choose_blocks(p);
        segments_ = choose_segments(p, request.options);

        scratch_bytes_ = std::max(kernels_.forward_scratch(shape_), kernels_.recurrent_scratch(shape_));
        if (segments_ > 1) {
            transition_shape_ = shape_;
            transition_shape_.slice_strips = std::max(strips(p.dim_k), strips_);
            scratch_bytes_ = std::max(scratch_bytes_, kernels_.forward_scratch(transition_shape_));
            const auto K = std::size_t(p.dim_k), V = std::size_t(p.dim_v), H = std::size_t(p.heads_v);
            const std::size_t cuts = std::size_t(sequences_) * std::size_t(segments_ - 1);
            star_ = workspace_.book<float>("end states from zero [N,segments-1,Hv,K,V]", cuts * H * K * V);
            transition_ = workspace_.book<float>("transitions [N,segments-1,Hv,K,K]", cuts * H * K * K);
            carry_ = workspace_.book<float>("segment start states [N,segments-1,Hv,K,V]", cuts * H * K * V);
        }
        scratch_bytes_ = (scratch_bytes_ + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
        scratch_ = workspace_.book<std::byte>("scratch of " + std::to_string(threads_) + " threads",
                                              scratch_bytes_ * std::size_t(threads_));
        rows_ = workspace_.book<std::int64_t>("first checkpoint row of each sequence",
                                              p.checkpoints == Checkpoints::none ? 0 : std::size_t(sequences_));
    }

    std::string explain() const override {
        return std::string("chunked, ") + (shape_.bf16_dot ? "bf16 dot products" : "fp32 products") + " on " +
               kernels_.name + "; " + std::to_string(threads_) + " threads over (sequence, " + std::to_string(blocks_) +
               " blocks of key heads, " + std::to_string(slices_) + " slices of values)" +
               (segments_ > 1 ? ", sequences cut into " + std::to_string(segments_) + " segments with exact carry"
                              : ", sequences not cut by time");
    }

    Status run(const ForwardCall& call, std::byte* workspace, Stream) const noexcept override {
        std::int64_t* rows = rows_.count > 0 && call.checkpoints ? rows_.in(workspace) : nullptr;
        if (rows) count_checkpoint_rows(call, rows);
        if (call.checkpoints) zero_unused_checkpoints(call, rows);
        zero_unused_rows(call, threads_);
        if (segments_ > 1) carry_states(call, workspace);
        const std::int64_t heads = blocks_;
        parallel_for(call.count * segments_ * heads * slices_, threads_, [&](std::int64_t i, std::int32_t thread) {
            std::byte* scratch = scratch_.in(workspace) + std::size_t(thread) * scratch_bytes_;
            const std::int64_t slice = i % slices_, block = i / slices_ % heads, part = i / slices_ / heads;
            const std::int64_t n = part / segments_, segment = part % segments_;
            const Slots slots = slots_of(call, n);
            if (slots.padding) return;
            const Span span = span_of(call, n);
            if (span.length < kRecurrentBelow) {
                if (slice == 0 && segment == 0) run_recurrent(call, n, span, slots, block, rows, scratch);
                return;
            }
            ForwardTask task = segment_task(call, n, span, segment, std::int32_t(block));
            if (task.span.length == 0) return;
            task.slots = slots;
            task.strip_begin = std::int32_t(slice) * shape_.slice_strips;
            task.strip_end = std::min(strips_, task.strip_begin + shape_.slice_strips);
            task.checkpoint_row = rows ? rows[n] : 0;
            task.to = task.last ? StateEnd::call : StateEnd::zeros;
            if (segment > 0) {
                task.from = StateEnd::carry;
                task.carry_in = carry_.in(workspace) + cut(n, segment - 1) * state_floats(call);
            }
            kernels_.forward(task, scratch);
        });
        return {};
    }

private:
    std::int32_t strips(std::int32_t columns) const {
        const auto width = static_cast<std::int32_t>(kernels_.strip_columns);
        return (columns + width - 1) / width;
    }

    // A task owns as many key heads as keep its states in the second-level cache; fewer, and then slices of the values,
    // when that leaves threads idle. The bits of a column depend on neither.
    void choose_blocks(const Problem& p) {
        const std::int64_t enough = threads_ == 1 ? 1 : 2 * std::int64_t(threads_);
        const std::int64_t state = std::int64_t(shape_.group) * p.dim_k * p.dim_v * (shape_.bf16_dot ? 6 : 4);
        std::int32_t heads = std::int32_t(std::clamp<std::int64_t>(kStateBytes / state, 1, p.heads_k));
        const auto blocks = [&](std::int32_t h) { return (p.heads_k + h - 1) / h; };
        while (heads > 1 && sequences_ * blocks(heads) < enough) --heads;
        shape_.key_heads = (p.heads_k + blocks(heads) - 1) / blocks(heads);  // even blocks
        blocks_ = blocks(shape_.key_heads);
        std::int32_t slices = 1;
        while (slices < strips_ && sequences_ * blocks_ * slices < enough) ++slices;
        shape_.slice_strips = (strips_ + slices - 1) / slices;
        slices_ = (strips_ + shape_.slice_strips - 1) / shape_.slice_strips;
    }

    // Cutting by time multiplies the work by 2.3, so it pays only when most threads would idle.
    std::int32_t choose_segments(const Problem& p, const PlanOptions& options) const {
        const std::int64_t most = std::max<std::int64_t>(1, (p.tokens + kChunk - 1) / kChunk);
        if (options.context_split > 0) return std::int32_t(std::min<std::int64_t>(options.context_split, most));
        if (options.deterministic || options.batch_invariant) return 1;
        const std::int64_t busy = std::max<std::int64_t>(1, sequences_ * blocks_ * slices_);
        if (busy * 4 > threads_) return 1;
        const std::int64_t tokens = p.sequences > 0 ? p.tokens / p.sequences : p.tokens;
        return static_cast<std::int32_t>(
            std::clamp<std::int64_t>(std::min(threads_ / busy, tokens / kMinSegment), 1, kMaxAutomaticSegments));
    }

    std::int64_t cut(std::int64_t n, std::int64_t segment) const { return n * (segments_ - 1) + segment; }
    static std::int64_t state_floats(const ForwardCall& call) {
        return std::int64_t(call.problem.heads_v) * call.problem.dim_k * call.problem.dim_v;
    }
    static std::int64_t transition_floats(const ForwardCall& call) {
        return std::int64_t(call.problem.heads_v) * call.problem.dim_k * call.problem.dim_k;
    }

    // Segment boundaries depend on the sequence's own length alone and lie on multiples of kChunk.
    ForwardTask segment_task(const ForwardCall& call, std::int64_t n, const Span& span, std::int64_t segment,
                             std::int32_t block) const {
        const std::int64_t step = (span.length / segments_ + kChunk - 1) / kChunk * kChunk;
        const std::int64_t size = segments_ == 1 ? span.length : std::max(step, kChunk);
        const std::int64_t begin = std::min(span.length, segment * size);
        const std::int64_t end = segment == segments_ - 1 ? span.length : std::min(span.length, begin + size);
        ForwardTask task;
        task.call = &call;
        task.shape = shape_;
        task.sequence = n;
        task.span = {span.batch, span.begin + begin, end - begin};
        task.first_token = begin;
        task.key_begin = block * shape_.key_heads;
        task.key_end = std::min(call.problem.heads_k, task.key_begin + shape_.key_heads);
        task.last = end == span.length;
        return task;
    }

    // End state from zero and transition of every segment but the last, then the states the segments start from.
    void carry_states(const ForwardCall& call, std::byte* workspace) const {
        const Problem& p = call.problem;
        float* star = star_.in(workspace);
        float* transition = transition_.in(workspace);
        float* carry = carry_.in(workspace);
        const std::int64_t heads = blocks_, cuts = segments_ - 1;
        parallel_for(call.count * cuts * heads * 2, threads_, [&](std::int64_t i, std::int32_t thread) {
            const bool is_transition = i % 2 == 1;
            const std::int64_t head = i / 2 % heads, part = i / 2 / heads, n = part / cuts, segment = part % cuts;
            const Span span = span_of(call, n);
            ForwardTask task = segment_task(call, n, span, segment, std::int32_t(head));
            if (span.length < kRecurrentBelow || task.span.length == 0 || task.last || slots_of(call, n).padding)
                return;
            task.shape = transition_shape_;
            task.strip_end = is_transition ? strips(p.dim_k) : strips_;
            task.transition = is_transition;
            task.write_output = false;
            task.from = is_transition ? StateEnd::identity : StateEnd::zeros;
            task.to = StateEnd::carry;
            task.carry_out = is_transition ? transition + cut(n, segment) * transition_floats(call)
                                           : star + cut(n, segment) * state_floats(call);
            kernels_.forward(task, scratch_.in(workspace) + std::size_t(thread) * scratch_bytes_);
        });
        parallel_for(call.count * p.heads_v, threads_, [&](std::int64_t i, std::int32_t thread) {
            const std::int64_t n = i / p.heads_v, head = i % p.heads_v;
            join_segments(call, n, head, star, transition, carry,
                          reinterpret_cast<float*>(scratch_.in(workspace) + std::size_t(thread) * scratch_bytes_));
        });
    }

    void join_segments(const ForwardCall& call, std::int64_t n, std::int64_t head, const float* star,
                       const float* transition, float* carry, float* initial) const {
        const Problem& p = call.problem;
        const Span span = span_of(call, n);
        const Slots slots = slots_of(call, n);
        if (slots.padding || span.length < kRecurrentBelow) return;
        const std::int64_t kv = std::int64_t(p.dim_k) * p.dim_v, kk = std::int64_t(p.dim_k) * p.dim_k;
        copy_state(call, slots.read, head, initial);
        const float* before = initial;
        for (std::int64_t segment = 0; segment + 1 < segments_; ++segment) {
            const ForwardTask task = segment_task(call, n, span, segment, 0);
            if (task.last || task.span.length == 0) return;
            const std::int64_t at = cut(n, segment);
            float* after = carry + at * state_floats(call) + head * kv;
            kernels_.join(shape_, star + at * state_floats(call) + head * kv,
                          transition + at * transition_floats(call) + head * kk, before, after);
            before = after;
        }
    }

    // [K,V] floats of an initial state; zeros when there is none.
    static void copy_state(const ForwardCall& call, std::int64_t row, std::int64_t head, float* to) {
        const Problem& p = call.problem;
        const StateRef& s = call.initial_state;
        for (std::int64_t k = 0; k < p.dim_k; ++k)
            for (std::int64_t v = 0; v < p.dim_v; ++v)
                to[k * p.dim_v + v] =
                    row < 0 ? 0.0f : load_float(s.data, s.dtype, s.offset(row, head) + k * s.k + v * s.v);
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
    Shape shape_, transition_shape_;
    std::int32_t strips_ = 1, blocks_ = 1, slices_ = 1, segments_ = 1;
    std::size_t scratch_bytes_ = 0;
    Booking<float> star_, transition_, carry_;
    Booking<std::byte> scratch_;
    Booking<std::int64_t> rows_;
};

}  // namespace

std::unique_ptr<PassPlan> plan_forward(const PlanRequest& request) { return std::make_unique<ForwardPlan>(request); }

}  // namespace flashqla::cpu
