// Plans and runs the backward pass by chunks: prepare as in forward; the state's walk forward, which leaves every
// chunk's state and deltas in the workspace; its gradient's walk back, which leaves every chunk's adjoint; then the
// gradients of all chunks at the same time. With few heads both walks are cut into segments that are walked at the same
// time.
#include <algorithm>
#include <string>

#include "cuda/chunk_setup.hpp"
#include "cuda/chunk_walk.hpp"
#include "cuda/host/device.hpp"
#include "cuda/plans.hpp"
#include "cuda/sm80/adjoint/params.hpp"
#include "cuda/sm80/carry/params.hpp"
#include "cuda/sm80/chunk/params.hpp"
#include "cuda/sm80/gradient/params.hpp"
#include "cuda/sm90/adjoint/params.hpp"
#include "cuda/sm90/gradient/params.hpp"

namespace flashqla::cuda {
namespace {

constexpr const char* kFunction = "flashqla::backward";
constexpr double kMostBlocks = 2147483647.0;

std::uint32_t tiles_of(std::int32_t columns) {
    return static_cast<std::uint32_t>(padded_columns(columns) / kChunkColumns);
}

const GpuInfo& gpu_of(std::int32_t index) { return gpus().list[static_cast<std::size_t>(index)]; }

// The walks of SegmentCosts.
constexpr int kHistory = 0, kAdjoint = 1, kEnds = SegmentCosts::kOfAll, kStarts = kEnds + 1;

// As in cuda/chunk_walk.hpp. An adjoint block alone has two warps for the same columns, where there is such a kernel.
constexpr float kAdjointAlone = 4.75f, kAdjointTwo = 7.1f, kStartsShare = 0.85f, kAdjointStart = 5.0f;
constexpr float kHopperAdjoint = 2.4f, kHopperAdjointWide = 3.9f;

struct AdjointShapes {
    struct Shape {
        std::int32_t columns = kChunkColumns, stages = 1, split = 1;
    };
    Shape shapes[SegmentCosts::kLaunches];
    WalkLaunch launches[SegmentCosts::kLaunches];
    bool hopper;

    // NOTE: `split` shows in the bits, and a call that must not depend on its neighbours may not choose it by them.
    AdjointShapes(const Problem& p, const GpuInfo& gpu, bool may_split)
        : hopper(gpu.hopper && sm90::has_adjoint_kernel(p)) {
        const auto fits = [&](int split, int stages, std::size_t blocks) {
            constexpr std::size_t kReserved = 1 << 10;  // of each block but the first, whose share the limit leaves out
            return blocks * sm80::adjoint_shared_bytes(p, split, stages) + (blocks - 1) * kReserved <=
                   static_cast<std::size_t>(gpu.shared_bytes);
        };
        const auto tiles = static_cast<std::int32_t>(tiles_of(p.dim_v));
        const float share = 1.0f / static_cast<float>(gpu.multiprocessors);
        if (hopper) {
            launches[0] = {kHopperAdjoint, kAdjointStart, tiles, 0, share};
            if (tiles % 2 != 0) return;
            shapes[1].columns = 128;
            launches[1] = {kHopperAdjointWide, kAdjointStart, tiles / 2, 0, share};
            return;
        }
        if (may_split && sm80::can_split_keys(p) && fits(2, 1, 1)) shapes[0].split = 2;
        if (fits(shapes[0].split, 2, 1)) shapes[0].stages = 2;
        launches[0] = {kAdjointAlone, kAdjointStart, tiles, 0, share};
        if (fits(1, 1, 2)) launches[1] = {kAdjointTwo, kAdjointStart, tiles, 0, share / 2};
    }

    Status run(const char* function, const sm80::AdjointParams& params, int device, Stream stream) const noexcept {
        return hopper ? sm90::launch_adjoints(function, params, device, stream)
                      : sm80::launch_adjoints(function, params, device, stream);
    }
    std::string explain(int launch) const {
        const Shape& shape = shapes[launch];
        if (hopper) return "back " + std::to_string(shape.columns) + " columns by Hopper's matrix units";
        return "back " + std::to_string(shape.stages) + " and " + std::to_string(shape.split) + " warp(s) over K";
    }
};

struct BackwardShapes {
    const ChunkFamily& family;
    ChunkWalkShapes history, ends;
    AdjointShapes adjoint;
    SegmentCosts costs;

    BackwardShapes(const Problem& p, const GpuInfo& gpu, const PlanOptions& options)
        : family(chunk_family(p, gpu)),
          history(p, gpu, family, family.history, 0),
          ends(p, gpu, family, family.ends, p.dim_k),
          adjoint(p, gpu, !options.batch_invariant) {
        for (int i = 0; i < SegmentCosts::kLaunches; ++i) {
            costs.walks[kHistory][i] = history.launches[i];
            costs.walks[kEnds][i] = ends.launches[i];
            costs.walks[kAdjoint][i] = costs.walks[kStarts][i] = adjoint.launches[i];
            costs.walks[kStarts][i].step *= kStartsShare;
        }
        costs.carry = 2 * kCarryTime;
        costs.carry_step = 2 * kCarryStep;
        costs.heads = p.heads_v;
        costs.carry_share = sm80::carry_share(p, gpu.multiprocessors);
    }
};

class ChunkedBackwardPlan final : public PassPlan {
public:
    explicit ChunkedBackwardPlan(const PlanRequest& request)
        : device_(request.device.index),
          shapes_(request.problem, gpu_of(device_), request.options),
          segments_(request.problem, request.options, shapes_.costs),
          setup_(request.problem, device_, segments_, false, workspace_) {
        const Problem& p = request.problem;
        const GpuInfo& gpu = gpu_of(device_);
        const auto shared = static_cast<std::size_t>(gpu.shared_bytes);
        rows_ = static_cast<std::uint32_t>(setup_.segments() * p.heads_v);
        hopper_gradient_ = gpu.hopper && sm90::has_gradient_kernel(p);
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
        if (segments_.split) {
            const auto of_segments = static_cast<std::size_t>(rows_);
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
                           std::to_string(setup_.chunks()) + " of them; states and adjoints kept for each chunk";
        const char* between = " by ";
        for (int i = 0; i < SegmentCosts::kLaunches; ++i) {
            if (segments_.may(kHistory, i)) {
                text += between + std::to_string(rows_ * shapes_.history.launches[i].count()) +
                        " blocks over (segment, value head, " + shapes_.history.explain(shapes_.family, i);
                between = ", ";
            }
            if (segments_.may(kAdjoint, i)) text += ", " + shapes_.adjoint.explain(i);
        }
        text += "; gradients of all chunks at once, ";
        text += hopper_gradient_ ? "by Hopper's matrix units"
                                 : std::to_string(columns_) + " columns of V at a time, " +
                                       std::to_string(gradient_stages_) + " such tile(s) in shared memory";
        text += "; " + segments_.explain();
        if (segments_.split) text += ", states and adjoints at the cuts by transitions and an exact carry in fp32";
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
        const auto gradients = hopper_gradient_ ? sm90::launch_gradients : sm80::launch_gradients;
        if (Status status = gradients(kFunction, params, setup_.chunks(), device_, stream); !status.ok()) return status;

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
        return {call, setup_.table(workspace, kEnds), {starts_.in(workspace), ends_.in(workspace)}, {}, 0, 0};
    }
    SegmentAdjoints segments(std::byte* workspace) const noexcept {
        return {adjoint_starts_.in(workspace), adjoint_ends_.in(workspace)};
    }

    Status keep_states(const BackwardCall& call, std::byte* workspace, Stream stream) const noexcept {
        if (setup_.chunks() == 0) return {};
        ChunkParams params;
        static_cast<Inputs&>(params.call) = call;
        params.call.initial_state = call.initial_state;
        params.from = setup_.prepared(workspace);
        if (segments_.split) {
            params.states = {starts_.in(workspace), ends_.in(workspace)};
            params.mode = ChunkMode::ends;
            if (Status status = walk(params, kEnds, shapes_.ends, workspace, stream); !status.ok()) return status;
            Status status = sm80::launch_carry(kFunction, carry(call, workspace), device_, stream);
            if (!status.ok()) return status;
        }
        params.history = history_.in(workspace);
        params.deltas = deltas_.in(workspace);
        params.mode = ChunkMode::history;
        return walk(params, kHistory, shapes_.history, workspace, stream);
    }

    Status keep_adjoints(const BackwardCall& call, std::byte* workspace, Stream stream) const noexcept {
        sm80::AdjointParams params;
        params.call = call;
        params.prepared = setup_.prepared(workspace);
        params.adjoints = adjoints_.in(workspace);
        params.residuals = residuals_.in(workspace);
        if (segments_.split) {
            params.segments = segments(workspace);
            params.only_starts = true;
            if (Status status = walk_back(params, kStarts, workspace, stream); !status.ok()) return status;
            sm80::CarryParams back = carry(call, workspace);
            back.adjoints = params.segments;
            if (Status status = sm80::launch_carry(kFunction, back, device_, stream); !status.ok()) return status;
            params.only_starts = false;
        }
        return walk_back(params, kAdjoint, workspace, stream);
    }

    Status walk(const ChunkParams& params, int walk, const ChunkWalkShapes& shapes, std::byte* workspace,
                Stream stream) const noexcept {
        return run_walk(kFunction, params, shapes_.family, shapes, walk, segments_, setup_, rows_, workspace, device_,
                        stream);
    }
    // As run_walk().
    Status walk_back(sm80::AdjointParams& params, int walk, std::byte* workspace, Stream stream) const noexcept {
        for (int i = 0; i < SegmentCosts::kLaunches; ++i) {
            if (!segments_.may(walk, i)) continue;
            params.table = setup_.table(workspace, walk, i);
            const AdjointShapes::Shape& shape = shapes_.adjoint.shapes[i];
            params.columns = shape.columns;
            params.stages = shape.stages;
            params.split = shape.split;
            params.tiles = shapes_.adjoint.launches[i].count();
            params.blocks = rows_ * params.tiles;
            if (Status status = shapes_.adjoint.run(kFunction, params, device_, stream); !status.ok()) return status;
        }
        return {};
    }

    std::int32_t device_;
    BackwardShapes shapes_;
    SegmentPlan segments_;
    ChunkSetup setup_;
    std::uint32_t rows_ = 0, zero_blocks_ = 0;  // segments and value heads
    bool hopper_gradient_ = false;
    std::int32_t gradient_stages_ = 1, columns_ = 64;
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
