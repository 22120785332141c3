#include "cpu/time_split.hpp"

#include <algorithm>

#include "base/float16.hpp"
#include "cpu/parallel.hpp"

namespace flashqla::cpu {
namespace {

// [K,V] floats of an initial state; zeros when there is none.
void copy_state(const ForwardCall& call, std::int64_t row, std::int64_t head, float* to) {
    const Problem& p = call.problem;
    const StateRef& s = call.initial_state;
    for (std::int64_t k = 0; k < p.dim_k; ++k)
        for (std::int64_t v = 0; v < p.dim_v; ++v)
            to[k * p.dim_v + v] = row < 0 ? 0.0f : load_float(s.data, s.dtype, s.offset(row, head) + k * s.k + v * s.v);
}

}  // namespace

TimeSplit::TimeSplit(const Kernels& kernels, const Problem& p, const Shape& shape, std::int32_t blocks,
                     std::int32_t segments, bool backward, WorkspaceLayout& workspace)
    : kernels_(&kernels), shape_(shape), blocks_(blocks), segments_(segments) {
    if (segments_ <= 1) return;
    shape_.slice_strips = std::max(kernels_->strips(p.dim_k), kernels_->strips(p.dim_v));
    scratch_bytes_ = kernels_->forward_scratch(shape_);
    const auto K = std::size_t(p.dim_k), V = std::size_t(p.dim_v), H = std::size_t(p.heads_v);
    const auto sequences = std::size_t(p.sequences > 0 ? p.sequences : p.batch);
    const std::size_t cuts = sequences * std::size_t(segments_ - 1);
    star_ = workspace.book<float>("end states from zero [N,segments-1,Hv,K,V]", cuts * H * K * V);
    transition_ = workspace.book<float>("transitions [N,segments-1,Hv,K,K]", cuts * H * K * K);
    carry_ = workspace.book<float>("segment start states [N,segments-1,Hv,K,V]", cuts * H * K * V);
    initial_ = workspace.book<float>("states before the first segment [N,Hv,K,V]", sequences * H * K * V);
    if (backward) adjoint_ = workspace.book<float>("segment end adjoints [N,segments-1,Hv,K,V]", cuts * H * K * V);
}

Segment TimeSplit::segment(const Inputs& in, std::int64_t n, std::int64_t index) const {
    const Span span = span_of(in, n);
    if (segments_ == 1) return {span, 0, true};
    const std::int64_t size = std::max((span.length / segments_ + kChunk - 1) / kChunk * kChunk, kChunk);
    const std::int64_t begin = std::min(span.length, index * size);
    const std::int64_t end = index == segments_ - 1 ? span.length : std::min(span.length, begin + size);
    return {{span.batch, span.begin + begin, end - begin}, begin, end == span.length};
}

void TimeSplit::carry(const ForwardCall& call, std::byte* workspace, std::int32_t threads, std::byte* scratch,
                      std::size_t scratch_stride, std::int64_t least) const {
    const Problem& p = call.problem;
    const std::int64_t cuts = segments_ - 1;
    parallel_for(call.count * cuts * blocks_ * 2, threads, [&](std::int64_t i, std::int32_t thread) {
        const bool transition = i % 2 == 1;
        const std::int64_t block = i / 2 % blocks_, part = i / 2 / blocks_, n = part / cuts, index = part % cuts;
        const Segment s = segment(call, n, index);
        if (span_of(call, n).length < least || s.span.length == 0 || s.last || slots_of(call, n).padding) return;
        ForwardTask task;
        task.call = &call;
        task.shape = shape_;
        task.sequence = n;
        task.span = s.span;
        task.first_token = s.first;
        task.key_begin = std::int32_t(block) * shape_.key_heads;
        task.key_end = std::min(p.heads_k, task.key_begin + shape_.key_heads);
        task.strip_end = kernels_->strips(transition ? p.dim_k : p.dim_v);
        task.transition = transition;
        task.write_output = false;
        task.last = false;
        task.from = transition ? StateEnd::identity : StateEnd::zeros;
        task.to = StateEnd::carry;
        task.carry_out = transition ? transition_.in(workspace) + cut(n, index) * transition_floats(call)
                                    : star_.in(workspace) + cut(n, index) * state_floats(call);
        kernels_->forward(task, scratch + std::size_t(thread) * scratch_stride);
    });
    parallel_for(call.count * p.heads_v, threads,
                 [&](std::int64_t i, std::int32_t) { join(call, workspace, i / p.heads_v, i % p.heads_v, least); });
}

void TimeSplit::join(const ForwardCall& call, std::byte* workspace, std::int64_t n, std::int64_t head,
                     std::int64_t least) const {
    const Problem& p = call.problem;
    const Slots slots = slots_of(call, n);
    if (slots.padding || span_of(call, n).length < least) return;
    const std::int64_t kv = std::int64_t(p.dim_k) * p.dim_v, kk = std::int64_t(p.dim_k) * p.dim_k;
    float* before = start(call, workspace, n, 0) + head * kv;
    copy_state(call, slots.read, head, before);
    for (std::int64_t index = 0; index + 1 < segments_ && !segment(call, n, index).last; ++index) {
        const std::int64_t at = cut(n, index);
        float* after = start(call, workspace, n, index + 1) + head * kv;
        kernels_->join(shape_, star_.in(workspace) + at * state_floats(call) + head * kv,
                       transition_.in(workspace) + at * transition_floats(call) + head * kk, before, after);
        before = after;
    }
}

void TimeSplit::join_back(const Inputs& in, std::byte* workspace, std::int32_t threads) const {
    const Problem& p = in.problem;
    const std::int64_t kv = std::int64_t(p.dim_k) * p.dim_v, kk = std::int64_t(p.dim_k) * p.dim_k;
    parallel_for(in.count * p.heads_v, threads, [&](std::int64_t i, std::int32_t) {
        const std::int64_t n = i / p.heads_v, head = i % p.heads_v;
        std::int64_t last = 0;
        while (!segment(in, n, last).last) ++last;
        for (std::int64_t index = last - 1; index > 0; --index)
            kernels_->join_adjoint(
                shape_, transition_.in(workspace) + cut(n, index) * transition_floats(in) + head * kk,
                adjoint(in, workspace, n, index + 1) + head * kv, adjoint(in, workspace, n, index) + head * kv);
    });
}

}  // namespace flashqla::cpu
