#include "cuda/chunk_setup.hpp"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "cuda/host/device.hpp"
#include "cuda/sm80/prepare/params.hpp"
#include "cuda/sm80/table/params.hpp"

namespace flashqla::cuda {

std::int64_t sequences_of(const Problem& p) noexcept { return p.sequences > 0 ? p.sequences : p.batch; }

std::uint32_t zero_blocks_of(const Problem& p) noexcept {
    constexpr double kElements = 64 << 10, kMost = 512;  // elements of o that are worth a block, blocks
    if (p.sequences == 0 || p.tokens == 0) return 0;     // only packed tokens can lie past the last sequence
    // NOTE: double, because sizes that no backend takes come this far, and their product may not fit.
    const double elements = static_cast<double>(p.tokens) * p.heads_v * p.dim_v;
    return static_cast<std::uint32_t>(std::min(1 + elements / kElements, kMost));
}

namespace {

// Lengths a packed call of T tokens may have, all of which decide together which launches a plan has: one long sequence
// with this share of the tokens, the others alike. What lengths it has is not known here.
constexpr double kShares[] = {1.0, 0.875, 0.75, 0.5, 0.0};

struct Mix {
    std::uint32_t longest, others, other_length;
    std::uint32_t forgetful = 0, warm = 0;  // of the heads (SegmentCounts)
};

// Gates it may have, which are not known either: nothing is forgotten; most heads forget as those of trained models do;
// all do at once.
std::vector<Mix> with_gates(const Mix& mix, const SegmentCosts& costs) {
    std::vector<Mix> all{mix};
    if (costs.windows <= 0) return all;
    const auto heads = static_cast<std::uint32_t>(costs.heads), most = static_cast<std::uint32_t>(costs.most_window);
    all.push_back({mix.longest, mix.others, mix.other_length, heads - heads / 4, (heads - heads / 4) * most / 2});
    all.push_back({mix.longest, mix.others, mix.other_length, heads, heads});
    return all;
}

Mix mix_of(const Problem& p, std::int64_t chunks, double share) {
    if (p.sequences == 0) {
        const auto all = static_cast<std::uint32_t>(chunks);
        return {all, static_cast<std::uint32_t>(p.batch) - 1, all};
    }
    const auto others = static_cast<double>(p.sequences - 1), total = static_cast<double>(chunks);
    const double longest = std::max(total * share, total / (others + 1));
    const double other = others > 0 ? (total - longest) / others : 0;
    return {static_cast<std::uint32_t>(std::ceil(longest)), static_cast<std::uint32_t>(others),
            static_cast<std::uint32_t>(std::floor(other))};
}

// The best choice for these lengths, and how long it takes.
std::pair<SegmentChoice, float> best_of(const SegmentCosts& costs, const Mix& mix) {
    SegmentChoice best;
    float least = 0;
    for (int candidate = 0; candidate < SegmentModel::kCandidates; ++candidate) {
        SegmentChoice choice;
        choice.segment_chunks = SegmentModel::segment_chunks(costs, mix.longest, candidate);
        SegmentCounts counts;
        counts.longest = mix.longest;
        counts.forgetful = mix.forgetful;
        counts.warm = mix.warm;
        counts.chunks = mix.longest + mix.others * mix.other_length;
        counts.add(1, mix.longest, static_cast<std::uint32_t>(choice.segment_chunks));
        counts.add(mix.others, mix.other_length, static_cast<std::uint32_t>(choice.segment_chunks));
        float time = SegmentModel::time(costs, counts, choice.segment_chunks, choice.launches);
        if (candidate == 0) time *= SegmentModel::gain(costs);
        if (candidate == 0 || time < least) best = choice, least = time;
    }
    return {best, least};
}

// Leaves out what some lengths would need, but not enough for what it costs all others: blocks that have nothing to do
// take a few microseconds.
void leave_out_rare_launches(SegmentCosts& costs, const std::vector<Mix>& mixes, std::int32_t whole) {
    // Where everything is together there are no such blocks.
    const float price_of_launch = costs.windows > 0 ? 1.0f : 3.0f;
    std::vector<float> all;
    for (const Mix& mix : mixes) all.push_back(best_of(costs, mix).second);
    const auto will_do = [&](const SegmentCosts& less, float price) {
        for (std::size_t i = 0; i < mixes.size(); ++i) {
            if (best_of(less, mixes[i]).second > all[i] + price) return false;
        }
        return true;
    };
    SegmentCosts less = costs;
    less.least = whole;
    if (will_do(less, 2 * price_of_launch)) costs = less;
    for (auto& walk : costs.walks) {
        if (walk[0].step <= 0 || walk[1].step <= 0) continue;
        for (WalkLaunch& launch : walk) {
            const float step = std::exchange(launch.step, 0.0f);
            if (will_do(costs, price_of_launch)) break;
            launch.step = step;
        }
    }
}

}  // namespace

SegmentPlan::SegmentPlan(const Problem& p, const PlanOptions& options, const SegmentCosts& all) : costs(all) {
    const bool packed = p.sequences > 0;
    const std::int64_t longest = std::max<std::int64_t>(1, pieces(p.tokens, sm80::chunk_tokens(p)));
    // NOTE: sizes that no backend takes come this far.
    const auto whole = static_cast<std::int32_t>(std::min<std::int64_t>(longest, INT32_MAX / 2));
    costs.least = 1, costs.most = whole;
    if (options.context_split > 0) {
        costs.least = costs.most = static_cast<std::int32_t>(pieces(whole, options.context_split));
    } else if (options.batch_invariant) {
        costs.least = whole;
    }
    std::vector<Mix> mixes;
    for (const double share : kShares) {
        for (const Mix& mix : with_gates(mix_of(p, whole, share), costs)) mixes.push_back(mix);
        if (!packed || p.sequences == 1) break;
    }
    if (packed) leave_out_rare_launches(costs, mixes, costs.most);
    std::int32_t least = costs.most;
    for (const Mix& mix : mixes) {
        const SegmentChoice choice = best_of(costs, mix).first;
        launches |= choice.launches;
        if (choice.segment_chunks < static_cast<std::int32_t>(mix.longest)) {
            least = std::min(least, choice.segment_chunks);
        }
    }
    // Other lengths than those may be better off with shorter segments, but not much.
    if (packed && costs.least < costs.most && least < costs.most) least = std::max(1, least - least / 4);
    costs.least = least;
    split = whole > least;
    on_device = (packed || costs.windows > 0) && least < costs.most;
    if (!on_device && !packed) costs.most = least;
    for (int walk = 0; walk < SegmentCosts::kWalks; ++walk) {
        for (int launch = 0; launch < SegmentCosts::kLaunches; ++launch) {
            if (!may(walk, launch)) costs.walks[walk][launch].step = 0;
        }
    }
}

std::string SegmentPlan::explain() const {
    if (!split) return "sequences in one piece";
    const std::string least = std::to_string(costs.least);
    return on_device ? "segments of " + least + " chunks or more, chosen on the GPU by the lengths" +
                           (costs.windows > 0 ? " and gates" : "")
                     : "segments of " + least + " chunks";
}

ChunkSetup::ChunkSetup(const Problem& p, std::int32_t device, const SegmentPlan& plan, bool together,
                       WorkspaceLayout& workspace)
    : device_(device),
      chunk_(sm80::chunk_tokens(p)),
      segment_chunks_(plan.costs.least),
      costs_(plan.costs),
      together_(together),
      split_(plan.split),
      tabled_(p.sequences > 0 || (together && plan.split)) {
    const std::int64_t longest = pieces(p.tokens, chunk_), n = sequences_of(p);
    if (p.sequences > 0) {
        // A sequence has at most one chunk that is not full, and one segment.
        chunks_ = p.tokens / chunk_ + std::min(n, p.tokens);
        segments_ = (plan.split ? chunks_ / segment_chunks_ : 0) + n;
    } else {
        chunks_ = n * longest;
        segments_ = n * std::max<std::int64_t>(1, pieces(longest, segment_chunks_));
    }
    if (tabled_) {
        const auto entries = static_cast<std::size_t>(n + 1);
        chunk_table_ = workspace.book<std::int32_t>("first chunk of each sequence", entries);
        segment_table_ = workspace.book<std::int32_t>("first segment of each sequence", entries);
        choice_ = workspace.book<SegmentChoice>("chunks of a segment", 1);
    }
    if (together) {
        if (tabled_) {
            taken_ = workspace.book<std::uint32_t>("items that blocks have taken", kTakenCounts);
            segment_records_ = workspace.book<SegmentRecord>("segments", static_cast<std::size_t>(segments_));
        }
        if (!split_) return;
        const auto rows = static_cast<std::size_t>(segments_ * p.heads_v);
        cut_ = workspace.book<std::int32_t>("sequences that are cut", static_cast<std::size_t>(n));
        windows_ = workspace.book<std::int32_t>("chunks before a cut that its state needs (segments, Hv)", rows);
        stored_ends_ =
            workspace.book<std::uint32_t>("columns of ends and transitions that are there (segments, Hv)", rows);
        stored_starts_ =
            workspace.book<std::uint32_t>("columns of states at the cuts that are there (segments, Hv)", rows);
        return;
    }
    // A block may take its whole group, whose products it then computes once, or share it with others while
    // multiprocessors would be idle.
    constexpr std::int64_t kBlocksEach = 4;
    const std::int64_t group = p.heads_v / p.heads_k, blocks = std::max<std::int64_t>(1, chunks_ * p.heads_k);
    const std::int64_t room = kBlocksEach * gpus().list[static_cast<std::size_t>(device)].multiprocessors;
    share_ = static_cast<std::int32_t>(pieces(group, std::clamp<std::int64_t>(room / blocks, 1, group)));
    const auto each = static_cast<std::size_t>(chunks_) * static_cast<std::size_t>(p.heads_v);
    prepared_ = workspace.book<std::byte>("prepared chunks (chunks, Hv)", each * sm80::prepared_bytes(p));
}

ChunkTable ChunkSetup::table(std::byte* workspace) const noexcept {
    ChunkTable table;
    if (tabled_) {
        table.chunks = chunk_table_.in(workspace);
        table.segments = segment_table_.in(workspace);
        table.choice = choice_.in(workspace);
        if (together_) table.taken = taken_.in(workspace);
        if (together_) table.records = segment_records_.in(workspace);
        if (together_ && split_) table.cut = cut_.in(workspace);
    }
    table.chunk = chunk_;
    table.segment_chunks = segment_chunks_;
    return table;
}

ChunkTable ChunkSetup::table(std::byte* workspace, int walk, int launch) const noexcept {
    ChunkTable table = this->table(workspace);
    table.launch = SegmentCosts::bit(walk, launch);
    return table;
}

ChunkTable ChunkSetup::table(std::byte* workspace, int walk) const noexcept {
    ChunkTable table = this->table(workspace);
    table.launch = SegmentCosts::bit(walk, 0) | SegmentCosts::bit(walk, 1);
    return table;
}

SegmentStates ChunkSetup::states(std::byte* workspace) const noexcept {
    SegmentStates states;
    if (!together_ || !split_) return states;
    if (costs_.windows > 0) states.windows = windows_.in(workspace);
    states.stored_ends = stored_ends_.in(workspace);
    states.stored_starts = stored_starts_.in(workspace);
    return states;
}

Status ChunkSetup::prepare(const char* function, const Inputs& in, std::byte* workspace, Stream stream) const noexcept {
    if (tabled_) {
        const sm80::TableParams params{in,
                                       chunk_,
                                       costs_,
                                       chunk_table_.in(workspace),
                                       segment_table_.in(workspace),
                                       choice_.in(workspace),
                                       together_ ? segment_records_.in(workspace) : nullptr,
                                       together_ && split_ ? cut_.in(workspace) : nullptr,
                                       together_ ? taken_.in(workspace) : nullptr,
                                       chunks_,
                                       segments_,
                                       states(workspace)};
        if (Status status = sm80::launch_table(function, params, device_, stream); !status.ok()) return status;
    }
    if (together_) return {};
    sm80::PrepareParams params{in, table(workspace), prepared(workspace), share_};
    return sm80::launch_prepare(function, params, chunks_, device_, stream);
}

}  // namespace flashqla::cuda
