// Cutting sequences by time when there are fewer heads than threads (context parallelism inside one processor).
//
// The state recurrence is affine in the entering state: over a segment, S_end = S* + M S_start, where S* starts from
// zero and M, the transition, is the same recurrence on the columns of the identity with v = 0. S* and M of all
// segments are computed in parallel and joined one after the other, exactly, in fp32. The adjoint runs the other way
// with the same M: D_start = D* + M^T D_end. (docs/math.md, "Segments".)
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/call.hpp"
#include "base/workspace.hpp"
#include "cpu/kernels.hpp"

namespace flashqla::cpu {

// Tokens of a segment at least, when the plan cuts by itself.
inline constexpr std::int64_t kMinSegment = 512;

// Segments that the options ask for: at most one a chunk, 1 where cutting would break a promise, 0 = the plan may
// choose.
inline std::int32_t forced_segments(const Problem& p, const PlanOptions& options) {
    const std::int64_t most = std::max<std::int64_t>(1, (p.tokens + kChunk - 1) / kChunk);
    if (options.context_split > 0) return std::int32_t(std::min<std::int64_t>(options.context_split, most));
    return options.deterministic || options.batch_invariant ? 1 : 0;
}

struct Segment {
    Span span;
    std::int64_t first = 0;  // position of its first token in the sequence
    bool last = true;        // the sequence ends with it
};

class TimeSplit {
public:
    TimeSplit() = default;
    // `shape` and `blocks`: how tasks cover the key heads.
    TimeSplit(const Kernels& kernels, const Problem& problem, const Shape& shape, std::int32_t blocks,
              std::int32_t segments, bool backward, WorkspaceLayout& workspace);

    std::int32_t segments() const noexcept { return segments_; }
    std::size_t scratch_bytes() const noexcept { return scratch_bytes_; }  // of a thread, in carry()

    // Boundaries depend on the sequence's own length alone and lie on multiples of kChunk. Later segments may be empty.
    Segment segment(const Inputs& in, std::int64_t n, std::int64_t index) const;

    // Fills the start states of all segments. NOTE: of first ones too, since the final state may take the place of the
    // initial one and be stored before the first segment has read. Sequences below `least` tokens are left out.
    void carry(const ForwardCall& call, std::byte* workspace, std::int32_t threads, std::byte* scratch,
               std::size_t scratch_stride, std::int64_t least) const;
    // [Hv,K,V] state that segment `index` starts from, where the sequence is cut.
    float* start(const Inputs& in, std::byte* workspace, std::int64_t n, std::int64_t index) const {
        if (index == 0) return initial_.in(workspace) + n * state_floats(in);
        return carry_.in(workspace) + cut(n, index - 1) * state_floats(in);
    }

    // [Hv,K,V] adjoint that segment `index` > 0 hands to the one before it. The caller stores D* there; join_back()
    // completes them from the last to the first.
    float* adjoint(const Inputs& in, std::byte* workspace, std::int64_t n, std::int64_t index) const {
        return adjoint_.in(workspace) + cut(n, index - 1) * state_floats(in);
    }
    void join_back(const Inputs& in, std::byte* workspace, std::int32_t threads) const;

private:
    std::int64_t cut(std::int64_t n, std::int64_t segment) const { return n * (segments_ - 1) + segment; }
    static std::int64_t state_floats(const Inputs& in) {
        return std::int64_t(in.problem.heads_v) * in.problem.dim_k * in.problem.dim_v;
    }
    static std::int64_t transition_floats(const Inputs& in) {
        return std::int64_t(in.problem.heads_v) * in.problem.dim_k * in.problem.dim_k;
    }
    void join(const ForwardCall& call, std::byte* workspace, std::int64_t n, std::int64_t head,
              std::int64_t least) const;

    const Kernels* kernels_ = nullptr;
    Shape shape_;
    std::int32_t blocks_ = 1, segments_ = 1;
    std::size_t scratch_bytes_ = 0;
    Booking<float> star_, transition_, carry_, initial_, adjoint_;
};

}  // namespace flashqla::cpu
