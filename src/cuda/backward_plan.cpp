// Plans and runs the backward pass by chunks: prepare as in forward; the state's walk forward, which leaves every
// chunk's state and deltas in the workspace; its gradient's walk back, which leaves every chunk's adjoint; then the
// gradients of all chunks at the same time. With few heads both walks are cut into segments that are walked at the same
// time.
#include <algorithm>
#include <string>

#include "cuda/chunk_setup.hpp"
#include "cuda/host/device.hpp"
#include "cuda/plans.hpp"
#include "cuda/sm80/adjoint/params.hpp"
#include "cuda/sm80/carry/params.hpp"
#include "cuda/sm80/chunk/params.hpp"
#include "cuda/sm80/gradient/params.hpp"

namespace flashqla::cuda {
namespace {

constexpr const char* kFunction = "flashqla::backward";
constexpr double kMostBlocks = 2147483647.0;

std::uint32_t tiles_of(std::int32_t columns) {
    return static_cast<std::uint32_t>(padded_columns(columns) / kChunkColumns);
}

const GpuInfo& gpu_of(std::int32_t index) { return gpus().list[static_cast<std::size_t>(index)]; }

// What a walk by one chunk takes when every multiprocessor has one block, and when it has two; a walk back multiplies
// more. Only the ratios matter.
constexpr double kStep = 2.5, kTwoSteps = 4.7, kBackShare = 1.3, kEndsShare = 0.8;
constexpr double kCarryStep = 3.0, kLaunch = 3.0;

// Microseconds of the two walks with sequences in so many segments.
double time_of_walks(const Problem& p, const GpuInfo& gpu, std::int64_t longest, std::int64_t segment_chunks) {
    const std::int64_t segments = pieces(longest, segment_chunks), rows = sequences_of(p) * p.heads_v;
    const auto step = [&](std::int64_t blocks) {
        if (blocks <= gpu.multiprocessors) return kStep;
        return kTwoSteps * static_cast<double>(pieces(blocks, 2 * std::int64_t(gpu.multiprocessors)));
    };
    const std::int64_t values = tiles_of(p.dim_v), keys = tiles_of(p.dim_k);
    double each = (1.0 + kBackShare) * step(rows * segments * values);
    if (segments == 1) return each * static_cast<double>(segment_chunks);
    each += kEndsShare *
            (step(rows * (segments - 1) * (values + keys)) + kBackShare * step(rows * (segments - 1) * values));
    return each * static_cast<double>(segment_chunks) + 2 * kCarryStep * static_cast<double>(segments - 1) +
           4 * kLaunch;
}

// Chunks of a segment: by the options, or so that the walks are done soonest.
std::int64_t segment_chunks_of(const PlanRequest& request) {
    const Problem& p = request.problem;
    const PlanOptions& options = request.options;
    const std::int64_t longest = std::max<std::int64_t>(1, pieces(p.tokens, sm80::chunk_tokens(p)));
    if (options.context_split > 0) return pieces(longest, options.context_split);
    std::int64_t best = longest;
    if (options.batch_invariant) return best;
    // A packed call of several sequences has as many tokens as one long one; how they lie is not known here.
    const GpuInfo& gpu = gpu_of(request.device.index);
    double least = 0.95 * time_of_walks(p, gpu, longest, longest);
    for (std::int64_t segments = 2; segments <= std::min<std::int64_t>(longest, 128); ++segments) {
        const double time = time_of_walks(p, gpu, longest, pieces(longest, segments));
        if (time < least) least = time, best = pieces(longest, segments);
    }
    return best;
}

class ChunkedBackwardPlan final : public PassPlan {
public:
    explicit ChunkedBackwardPlan(const PlanRequest& request)
        : device_(request.device.index), setup_(request.problem, device_, segment_chunks_of(request), workspace_) {
        const Problem& p = request.problem;
        const GpuInfo& gpu = gpu_of(device_);
        const auto shared = static_cast<std::size_t>(gpu.shared_bytes);
        tiles_ = tiles_of(p.dim_v);
        end_tiles_ = tiles_ + tiles_of(p.dim_k);
        blocks_ = static_cast<std::uint32_t>(setup_.segments() * p.heads_v) * tiles_;
        const bool alone = blocks_ <= static_cast<std::uint32_t>(gpu.multiprocessors);
        if (alone && sm80::chunk_shared_bytes(p, 64, 2) <= shared) history_stages_ = 2;
        if (alone && sm80::can_split_keys(p) && sm80::adjoint_shared_bytes(p, 2, 1) <= shared) adjoint_split_ = 2;
        if (alone && sm80::adjoint_shared_bytes(p, adjoint_split_, 2) <= shared) adjoint_stages_ = 2;
        columns_ = sm80::gradient_columns(p, gpu.shared_bytes);
        if (sm80::gradient_shared_bytes(p, columns_, 2) <= shared) gradient_stages_ = 2;

        const auto heads = static_cast<std::size_t>(setup_.chunks()) * static_cast<std::size_t>(p.heads_v);
        const auto rows = heads * static_cast<std::size_t>(sm80::chunk_parts(p.io) * padded_columns(p.dim_v));
        const auto states = rows * static_cast<std::size_t>(sm80::chunk_width(p.dim_k));
        const auto tokens = rows * static_cast<std::size_t>(setup_.chunk());
        history_ = workspace_.book<std::uint16_t>("states entering (chunks, Hv, parts, V, K)", states);
        adjoints_ = workspace_.book<std::uint16_t>("adjoints of states leaving (chunks, Hv, parts, V, K)", states);
        deltas_ = workspace_.book<std::uint16_t>("deltas (chunks, Hv, parts, V, tokens)", tokens);
        residuals_ = workspace_.book<std::uint16_t>("gradients of residuals (chunks, Hv, parts, V, tokens)", tokens);
        tokens_ = workspace_.book<sm80::TokenGradient>("gradients of gates and beta (chunks, Hv, tokens)",
                                                       heads * static_cast<std::size_t>(setup_.chunk()));
        if (p.gate == Gate::raw) {
            d_A_log_ = workspace_.book<double>("d_A_log of each chunk (chunks, Hv)", heads);
            d_dt_bias_ = workspace_.book<double>("d_dt_bias of each chunk (chunks, Hv)", heads);
        }
        if (setup_.split()) {
            const auto of_segments = static_cast<std::size_t>(setup_.segments()) * static_cast<std::size_t>(p.heads_v);
            const auto state = static_cast<std::size_t>(p.dim_v) * static_cast<std::size_t>(p.dim_k);
            const auto transition = static_cast<std::size_t>(p.dim_k) * static_cast<std::size_t>(p.dim_k);
            starts_ = workspace_.book<float>("states at the cuts (segments, Hv, V, K)", of_segments * state);
            ends_ = workspace_.book<float>("ends and transitions (segments, Hv, V + K, K)",
                                           of_segments * (state + transition));
            adjoint_starts_ =
                workspace_.book<float>("adjoints from zero ends (segments, Hv, V, K)", of_segments * state);
            adjoint_ends_ = workspace_.book<float>("adjoints at the cuts (segments, Hv, V, K)", of_segments * state);
        }
        zero_blocks_ = zero_blocks_of(p);
    }

    std::string explain() const override {
        std::string text = "chunks of " + std::to_string(setup_.chunk()) + " tokens on the matrix units, at most " +
                           std::to_string(setup_.chunks()) + " of them; states and adjoints kept for each chunk by " +
                           std::to_string(blocks_) + " blocks over (sequence, value head, " +
                           std::to_string(kChunkColumns) + " columns of V), " + std::to_string(history_stages_) +
                           " and " + std::to_string(adjoint_stages_) + " chunk(s) in shared memory, " +
                           std::to_string(adjoint_split_) +
                           " warp(s) over K on the way back; gradients of all chunks at once, " +
                           std::to_string(columns_) + " columns of V at a time, " + std::to_string(gradient_stages_) +
                           " such tile(s) in shared "
                           "memory; ";
        if (setup_.split()) {
            text += "segments of " + std::to_string(setup_.segment_chunks()) +
                    " chunks, states and adjoints at the cuts by transitions and an exact carry in fp32";
        } else {
            text += "sequences in one piece";
        }
        return text;
    }

    Status run(const BackwardCall& call, std::byte* workspace, Stream stream) const noexcept override {
        if (Status status = setup_.prepare(kFunction, call, workspace, stream); !status.ok()) return status;
        if (Status status = keep_states(call, workspace, stream); !status.ok()) return status;
        if (Status status = keep_adjoints(call, workspace, stream); !status.ok()) return status;

        sm80::GradientParams params;
        params.call = call;
        params.table = setup_.table(workspace);
        params.prepared = setup_.prepared(workspace);
        params.history = history_.in(workspace);
        params.adjoints = adjoints_.in(workspace);
        params.deltas = deltas_.in(workspace);
        params.residuals = residuals_.in(workspace);
        params.tokens = tokens_.in(workspace);
        params.stages = gradient_stages_;
        params.columns = columns_;
        if (Status status = sm80::launch_gradients(kFunction, params, setup_.chunks(), device_, stream); !status.ok()) {
            return status;
        }

        sm80::GatesParams gates;
        gates.call = call;
        gates.table = params.table;
        gates.tokens = params.tokens;
        if (d_A_log_.count > 0) {
            gates.d_A_log = d_A_log_.in(workspace);
            gates.d_dt_bias = d_dt_bias_.in(workspace);
        }
        gates.warps = setup_.chunks() * call.problem.heads_v;
        if (Status status = sm80::launch_gates(kFunction, gates, device_, stream); !status.ok()) return status;

        sm80::FinishParams finish;
        finish.call = call;
        finish.table = params.table;
        finish.d_A_log = gates.d_A_log;
        finish.d_dt_bias = gates.d_dt_bias;
        if (call.d_A_log || call.d_dt_bias) finish.head_blocks = static_cast<std::uint32_t>(call.problem.heads_v);
        finish.zero_blocks = zero_blocks_;
        return sm80::launch_finish(kFunction, finish, device_, stream);
    }

private:
    sm80::CarryParams carry(const BackwardCall& call, std::byte* workspace) const noexcept {
        return {call, setup_.table(workspace), {starts_.in(workspace), ends_.in(workspace)}, {}};
    }
    sm80::SegmentAdjoints segments(std::byte* workspace) const noexcept {
        return {adjoint_starts_.in(workspace), adjoint_ends_.in(workspace)};
    }

    Status keep_states(const BackwardCall& call, std::byte* workspace, Stream stream) const noexcept {
        if (setup_.chunks() == 0) return {};
        sm80::ChunkParams params;
        static_cast<Inputs&>(params.call) = call;
        params.call.initial_state = call.initial_state;
        params.table = setup_.table(workspace);
        params.from = setup_.prepared(workspace);
        params.stages = history_stages_;
        if (setup_.split()) {
            params.states = {starts_.in(workspace), ends_.in(workspace)};
            params.mode = sm80::ChunkMode::ends;
            params.tiles = end_tiles_;
            params.segment_blocks = blocks_ / tiles_ * end_tiles_;
            if (Status status = sm80::launch_chunks(kFunction, params, device_, stream); !status.ok()) return status;
            Status status = sm80::launch_carry(kFunction, carry(call, workspace), device_, stream);
            if (!status.ok()) return status;
        }
        params.history = history_.in(workspace);
        params.deltas = deltas_.in(workspace);
        params.mode = sm80::ChunkMode::history;
        params.tiles = tiles_;
        params.segment_blocks = blocks_;
        return sm80::launch_chunks(kFunction, params, device_, stream);
    }

    Status keep_adjoints(const BackwardCall& call, std::byte* workspace, Stream stream) const noexcept {
        sm80::AdjointParams params;
        params.call = call;
        params.table = setup_.table(workspace);
        params.prepared = setup_.prepared(workspace);
        params.adjoints = adjoints_.in(workspace);
        params.residuals = residuals_.in(workspace);
        params.tiles = tiles_;
        params.blocks = blocks_;
        params.stages = adjoint_stages_;
        params.split = adjoint_split_;
        if (setup_.split()) {
            params.segments = segments(workspace);
            params.only_starts = true;
            if (Status status = sm80::launch_adjoints(kFunction, params, device_, stream); !status.ok()) return status;
            sm80::CarryParams back = carry(call, workspace);
            back.adjoints = params.segments;
            if (Status status = sm80::launch_carry(kFunction, back, device_, stream); !status.ok()) return status;
            params.only_starts = false;
        }
        return sm80::launch_adjoints(kFunction, params, device_, stream);
    }

    std::int32_t device_;
    ChunkSetup setup_;
    std::uint32_t tiles_ = 1, end_tiles_ = 1, blocks_ = 0, zero_blocks_ = 0;
    std::int32_t history_stages_ = 1, adjoint_stages_ = 1, adjoint_split_ = 1, gradient_stages_ = 1, columns_ = 64;
    Booking<std::uint16_t> history_, adjoints_, deltas_, residuals_;
    Booking<sm80::TokenGradient> tokens_;
    Booking<double> d_A_log_, d_dt_bias_;
    Booking<float> starts_, ends_, adjoint_starts_, adjoint_ends_;
};

}  // namespace

std::string why_not_backward(const PlanRequest& request) {
    const Problem& p = request.problem;
    const double n = static_cast<double>(sequences_of(p));
    const double chunks = static_cast<double>(p.tokens) / sm80::chunk_tokens(p) + 1.0 + n;
    if (p.tokens >= (std::int64_t(1) << 31) ||
        (chunks * (p.sequences > 0 ? 1.0 : n) + n) * p.heads_v * (tiles_of(p.dim_v) + tiles_of(p.dim_k)) > kMostBlocks)
        return "cuda-sm80 would need more than 2^31 - 1 blocks for the backward pass of that many tokens and heads";
    const int shared = gpu_of(request.device.index).shared_bytes;
    const auto least = std::max(sm80::adjoint_shared_bytes(p, 1, 1), sm80::chunk_shared_bytes(p, kChunkColumns, 1));
    if (sm80::gradient_columns(p, shared) == 0 || least > static_cast<std::size_t>(shared))
        return "cuda-sm80 needs more shared memory for the backward pass of this type and dim_k " +
               std::to_string(p.dim_k) + " than a block has on cuda:" + std::to_string(request.device.index) + " (" +
               std::to_string(shared / 1024) + " KiB)";
    return {};
}

std::unique_ptr<PassPlan> plan_chunked_backward(const PlanRequest& request) {
    return std::make_unique<ChunkedBackwardPlan>(request);
}

}  // namespace flashqla::cuda
