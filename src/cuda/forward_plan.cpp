// Plans and runs forward by chunks: prepare, then the state's way through them; with few heads in segments at the same
// time, whose start states are found first.
#include <algorithm>
#include <string>

#include "cuda/chunk_setup.hpp"
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

// How a launch of the chunk kernel uses the multiprocessors.
struct ChunkShape {
    std::int32_t columns = 64, stages = 1;
    double step = 0;  // microseconds for all blocks to move by one chunk
};

// What a step takes, measured on one H200 (docs/kernels/cuda.md); only the ratios matter.
constexpr double kStepNarrow = 2.5, kStepTwoNarrow = 4.7, kStepWide = 4.1;
constexpr double kEndsShare = 0.7;  // of a step that computes no outputs
constexpr double kCarryStep = 3.0, kLaunch = 3.0;

ChunkShape shape_of(const Problem& p, const GpuInfo& gpu, std::int64_t rows, std::int64_t columns) {
    const auto shared = static_cast<std::size_t>(gpu.shared_bytes);
    const std::int64_t narrow = rows * pieces(columns, 64), wide = rows * pieces(columns, 128);
    const auto fits = [&](int width, int stages, int blocks) {
        constexpr std::size_t kReserved = 1 << 10;  // of each block but the first, whose share the limit leaves out
        return blocks * sm80::chunk_shared_bytes(p, width, stages) + (blocks - 1) * kReserved <= shared;
    };
    const std::int64_t all = gpu.multiprocessors;
    ChunkShape shape;
    if (narrow <= all) {
        shape.step = kStepNarrow;
        shape.stages = fits(64, 2, 1) ? 2 : 1;
        return shape;
    }
    shape.step = kStepTwoNarrow * static_cast<double>(pieces(narrow, 2 * all));
    shape.stages = fits(64, 2, 2) ? 2 : 1;
    const double wide_step = kStepWide * static_cast<double>(pieces(wide, all));
    if (sm80::has_wide_blocks(p) && columns % 128 == 0 && wide_step <= shape.step && fits(128, 1, 1)) {
        shape = {128, fits(128, 2, 1) ? 2 : 1, wide_step};
    }
    return shape;
}

// The decisions: chunks of a segment, and the shapes of both launches.
struct ForwardShape {
    std::int64_t segment_chunks = 1;
    ChunkShape outputs, ends;
    double time = 0;  // microseconds, without the prepare kernel

    ForwardShape(const Problem& p, const GpuInfo& gpu, std::int64_t longest, std::int64_t segments) {
        segment_chunks = std::max<std::int64_t>(1, pieces(longest, segments));
        segments = std::max<std::int64_t>(1, pieces(longest, segment_chunks));
        const std::int64_t rows = sequences_of(p) * p.heads_v;
        outputs = shape_of(p, gpu, rows * segments, p.dim_v);
        time = outputs.step * static_cast<double>(segment_chunks);
        if (segments == 1) return;
        ends = shape_of(p, gpu, rows * (segments - 1), p.dim_v + p.dim_k);
        time += ends.step * kEndsShare * static_cast<double>(segment_chunks) +
                kCarryStep * static_cast<double>(segments - 1) + 2 * kLaunch;
    }
};

ForwardShape choose(const PlanRequest& request) {
    const Problem& p = request.problem;
    const GpuInfo& gpu = gpus().list[static_cast<std::size_t>(request.device.index)];
    const std::int64_t longest = pieces(p.tokens, sm80::chunk_tokens(p));
    const PlanOptions& options = request.options;
    const std::int64_t asked = options.context_split > 0 ? options.context_split : options.batch_invariant ? 1 : 0;
    ForwardShape best(p, gpu, longest, std::max<std::int64_t>(asked, 1));
    if (asked > 0) return best;
    // A packed call of several sequences has as many tokens as one long one; how they lie is not known here.
    for (std::int64_t segments = 2; segments <= std::min<std::int64_t>(longest, 128); ++segments) {
        const ForwardShape other(p, gpu, longest, segments);
        if (other.time < 0.95 * best.time) best = other;
    }
    return best;
}

class ChunkedForwardPlan final : public PassPlan {
public:
    explicit ChunkedForwardPlan(const PlanRequest& request)
        : device_(request.device.index),
          shape_(choose(request)),
          setup_(request.problem, device_, shape_.segment_chunks, workspace_),
          packed_(request.problem.sequences > 0) {
        const Problem& p = request.problem;
        const std::int64_t rows = setup_.segments() * p.heads_v;
        tiles_ = static_cast<std::uint32_t>(pieces(p.dim_v, shape_.outputs.columns));
        end_tiles_ =
            static_cast<std::uint32_t>(pieces(p.dim_v, shape_.ends.columns) + pieces(p.dim_k, shape_.ends.columns));
        blocks_ = static_cast<std::uint32_t>(rows) * tiles_;
        end_blocks_ = static_cast<std::uint32_t>(rows) * end_tiles_;
        zero_blocks_ = zero_blocks_of(p);
        if (setup_.split()) {
            const auto states = static_cast<std::size_t>(rows);
            starts_ = workspace_.book<float>("states at the cuts (segments, Hv, V, K)", states * p.dim_v * p.dim_k);
            ends_ = workspace_.book<float>("ends and transitions (segments, Hv, V + K, K)",
                                           states * (p.dim_v + p.dim_k) * p.dim_k);
        }
    }

    std::string explain() const override {
        std::string text = "chunks of " + std::to_string(setup_.chunk()) + " tokens on the matrix units, at most " +
                           std::to_string(setup_.chunks()) + " of them; " + std::to_string(blocks_) +
                           " blocks over (segment, value head, " + std::to_string(shape_.outputs.columns) +
                           " columns of V), " + std::to_string(shape_.outputs.stages) + " chunk(s) in shared memory; ";
        if (setup_.split()) {
            text += "segments of " + std::to_string(setup_.segment_chunks()) +
                    " chunks, their start states by transitions and an exact carry in fp32; ";
        } else {
            text += "sequences in one piece; ";
        }
        return text + std::to_string((packed_ ? 1 : 0) + 2 + (setup_.split() ? 2 : 0)) + " launches";
    }

    Status run(const ForwardCall& call, std::byte* workspace, Stream stream) const noexcept override {
        if (Status status = setup_.prepare(kFunction, call, workspace, stream); !status.ok()) return status;
        sm80::ChunkParams params;
        params.call = call;
        params.table = setup_.table(workspace);
        params.from = setup_.prepared(workspace);
        if (setup_.split()) {
            params.states = {starts_.in(workspace), ends_.in(workspace)};
            params.mode = sm80::ChunkMode::ends;
            params.columns = shape_.ends.columns;
            params.stages = shape_.ends.stages;
            params.tiles = end_tiles_;
            params.segment_blocks = end_blocks_;
            if (Status status = sm80::launch_chunks(kFunction, params, device_, stream); !status.ok()) return status;
            const sm80::CarryParams carry{call, params.table, params.states, {}};
            if (Status status = sm80::launch_carry(kFunction, carry, device_, stream); !status.ok()) return status;
        }
        params.mode = sm80::ChunkMode::outputs;
        params.columns = shape_.outputs.columns;
        params.stages = shape_.outputs.stages;
        params.tiles = tiles_;
        params.segment_blocks = blocks_;
        params.zero_blocks = zero_blocks_;
        return sm80::launch_chunks(kFunction, params, device_, stream);
    }

private:
    std::int32_t device_;
    ForwardShape shape_;
    ChunkSetup setup_;
    bool packed_;
    std::uint32_t tiles_ = 1, end_tiles_ = 1, blocks_ = 0, end_blocks_ = 0, zero_blocks_ = 0;
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
