// Plans and runs forward by chunks: prepare, then the state's way through them; with few heads in segments at the same
// time, whose start states are found first.
#include <algorithm>
#include <string>

#include "cuda/chunk_setup.hpp"
#include "cuda/chunk_walk.hpp"
#include "cuda/host/device.hpp"
#include "cuda/plans.hpp"
#include "cuda/sm80/carry/params.hpp"
#include "cuda/sm80/chunk/params.hpp"

namespace flashqla::cuda {
namespace {

constexpr const char* kFunction = "flashqla::forward";
// Up to here the token recurrence is as fast.
constexpr std::int64_t kFewTokens = 16;
constexpr double kMostBlocks = 2147483647.0;

// The walks of SegmentCosts.
constexpr int kOutputs = 0, kEnds = SegmentCosts::kOfAll;

struct ForwardShapes {
    const ChunkFamily& family;
    ChunkWalkShapes outputs, ends;
    SegmentCosts costs;

    ForwardShapes(const Problem& p, const GpuInfo& gpu)
        : family(forward_family(p, gpu)),
          outputs(p, gpu, family, family.outputs, 0),
          ends(p, gpu, family, family.ends, p.dim_k) {
        std::copy_n(outputs.launches, SegmentCosts::kLaunches, costs.walks[kOutputs]);
        std::copy_n(ends.launches, SegmentCosts::kLaunches, costs.walks[kEnds]);
        costs.carry = kCarryTime;
        costs.carry_step = kCarryStep;
        costs.heads = p.heads_v;
        costs.carry_share = sm80::carry_share(p, gpu.multiprocessors);
        if (family.together) {
            costs.windows = kWindowsTime;
            costs.most_window = kMostWindow;
            costs.carry = kForwardCarryTime;
            costs.carry_step = kForwardCarryStep;
            costs.carry_share = sm90::forward_carry_share(p, gpu.multiprocessors);
        }
    }
};

class ChunkedForwardPlan final : public PassPlan {
public:
    explicit ChunkedForwardPlan(const PlanRequest& request)
        : device_(request.device.index),
          shapes_(request.problem, gpus().list[static_cast<std::size_t>(device_)]),
          segments_(request.problem, request.options, shapes_.costs),
          setup_(request.problem, device_, segments_, shapes_.family.together, workspace_) {
        const Problem& p = request.problem;
        rows_ = static_cast<std::uint32_t>(setup_.segments() * p.heads_v);
        zero_blocks_ = zero_blocks_of(p);
        if (segments_.split) {
            const auto states = static_cast<std::size_t>(rows_);
            starts_ = workspace_.book<float>("states at the cuts (segments, Hv, V, K)", states * p.dim_v * p.dim_k);
            const std::int64_t end =
                shapes_.family.together ? sm90::end_elements(p) : std::int64_t(p.dim_v + p.dim_k) * p.dim_k;
            ends_ = workspace_.book<float>("ends and transitions (segments, Hv, V + K, K)",
                                           states * static_cast<std::size_t>(end));
        }
    }

    std::string explain() const override {
        std::string text = "chunks of " + std::to_string(setup_.chunk()) + " tokens on the matrix units, at most " +
                           std::to_string(setup_.chunks()) + " of them; ";
        const bool together = shapes_.family.together;
        int launches = (setup_.tabled() ? 1 : 0) + (together ? 0 : segments_.split ? 2 : 1);
        const char* between = "";
        for (int i = 0; i < SegmentCosts::kLaunches; ++i) {
            launches += segments_.may(kEnds, i) && !together ? 1 : 0;
            if (!segments_.may(kOutputs, i)) continue;
            ++launches;
            text += between + std::to_string(rows_ * shapes_.outputs.launches[i].count()) +
                    (together ? " items, taken by as many blocks as multiprocessors: (" : " blocks over (") +
                    "segment, value head, " + shapes_.outputs.explain(shapes_.family, i);
            between = ", or ";
        }
        text += "; " + segments_.explain();
        if (segments_.split) {
            text += segments_.costs.windows > 0
                        ? ", their start states by a few chunks before the cut where the gates forget, else"
                        : ", their start states";
            text += " by transitions and an exact carry in fp32";
        }
        return text + "; " + std::to_string(launches) + " launches";
    }

    Status run(const ForwardCall& call, std::byte* workspace, Stream stream) const noexcept override {
        if (Status status = setup_.prepare(kFunction, call, workspace, stream); !status.ok()) return status;
        ChunkParams params;
        params.call = call;
        params.states = setup_.states(workspace);
        if (segments_.split) {
            params.states.starts = starts_.in(workspace);
            params.states.ends = ends_.in(workspace);
        }
        if (!shapes_.family.together) params.from = setup_.prepared(workspace);
        if (segments_.split && !shapes_.family.together) {
            params.mode = ChunkMode::ends;
            if (Status status = walk(params, kEnds, shapes_.ends, workspace, stream); !status.ok()) return status;
            const sm80::CarryParams carry{call, setup_.table(workspace, kEnds), params.states, {}, 0, 0};
            if (Status status = sm80::launch_carry(kFunction, carry, device_, stream); !status.ok()) return status;
        }
        params.mode = ChunkMode::outputs;
        params.zero_blocks = zero_blocks_;
        return walk(params, kOutputs, shapes_.outputs, workspace, stream);
    }

private:
    Status walk(const ChunkParams& params, int walk, const ChunkWalkShapes& shapes, std::byte* workspace,
                Stream stream) const noexcept {
        return run_walk(kFunction, params, shapes_.family, shapes, walk, segments_, setup_, rows_, workspace, device_,
                        stream);
    }

    std::int32_t device_;
    ForwardShapes shapes_;
    SegmentPlan segments_;
    ChunkSetup setup_;
    std::uint32_t rows_ = 0, zero_blocks_ = 0;  // segments and value heads
    Booking<float> starts_, ends_;
};

}  // namespace

bool forward_in_chunks(const PlanRequest& request) {
    const Problem& p = request.problem;
    const std::int64_t chunk = sm80::chunk_tokens(p), n = sequences_of(p);
    // A chunk's end is the only place where its state exists.
    if (p.checkpoints == Checkpoints::listed) return false;
    if (p.checkpoints == Checkpoints::every_n && p.checkpoint_every % chunk != 0) return false;
    // NOTE: a sequence alone has fewer tokens than in a batch, and must get the same bits.
    if (p.tokens <= kFewTokens * (p.sequences > 0 ? n : 1) && !request.options.batch_invariant) return false;
    const double rows = static_cast<double>(p.tokens) / chunk + 2.0 * static_cast<double>(n);
    const auto tiles = static_cast<double>(pieces(p.dim_v, 64) + pieces(p.dim_k, 64));
    return rows * p.heads_v * tiles < kMostBlocks && p.tokens < (std::int64_t(1) << 31);
}

std::unique_ptr<PassPlan> plan_chunked_forward(const PlanRequest& request) {
    return std::make_unique<ChunkedForwardPlan>(request);
}

}  // namespace flashqla::cuda
