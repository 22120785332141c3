// Where sequences are best cut: what the launches that walk through them take, by a simple model. One for the host,
// which knows the lengths of unpacked sequences and has to guess those of packed ones, and for the table kernel, which
// sees them.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/chunks.hpp"

namespace flashqla::cuda {

// A kernel that can do a walk, and how the GPU holds its blocks. Microseconds; only their ratios matter.
struct WalkLaunch {
    float step = 0;                      // a block moves by a chunk, every place taken; 0: there is no such kernel
    float start = 0;                     // before a block's first chunk and behind its last
    std::int32_t blocks = 0;             // of a segment and value head
    std::int32_t transition_blocks = 0;  // of these: what the first segment of a sequence does not need
    float share = 1;                     // of all blocks that are there at the same time, for one

    std::uint32_t count() const { return static_cast<std::uint32_t>(blocks); }
};

struct SegmentCosts {
    // The first two walks take every segment, the others all segments but the last (or first) of each sequence, which
    // is what a cut costs besides the carry. Each has one of its launches.
    static constexpr int kWalks = 4, kOfAll = 2, kLaunches = 2, kAllLaunches = kWalks * kLaunches;
    WalkLaunch walks[kWalks][kLaunches];
    float carry = 0, carry_step = 0;   // once, and for each cut of the longest sequence
    float carry_share = 1;             // of all that can be carried at the same time, for a sequence
    float windows = 0;                 // finding out which cuts need no carry, once; 0: all of them are carried
    std::int32_t most_window = 0;      // chunks that may be walked through before a cut instead
    std::int32_t heads = 1;            // value heads
    std::int32_t least = 1, most = 1;  // chunks of a segment that may be chosen

    // In SegmentChoice::launches.
    FQLA_HOST_DEVICE static constexpr std::uint32_t bit(int walk, int launch) {
        return 1u << (kLaunches * walk + launch);
    }
};

// What a choice makes of all sequences. NOTE: malformed offsets may overflow these; whatever is then chosen is valid.
struct SegmentCounts {
    std::uint32_t chunks = 0, longest = 0;  // of all sequences and of the longest, whatever is chosen
    // Segments, those of full length, those but the last of each sequence; sequences with more than one.
    std::uint32_t segments = 0, full = 0, cuts = 0, cut = 0;
    // Heads whose cuts are not carried, by the gates, and the chunks before a cut that are walked through instead, of
    // all of these heads together.
    std::uint32_t forgetful = 0, warm = 0;

    FQLA_HOST_DEVICE void add(std::uint32_t sequences, std::uint32_t length, std::uint32_t segment_chunks) {
        const std::uint32_t complete = length / segment_chunks;
        const std::uint32_t all = complete * segment_chunks < length ? complete + 1 : complete;
        segments += sequences * all;
        full += sequences * complete;
        if (all < 2) return;
        cuts += sequences * (all - 1);
        cut += sequences;
    }
};

class SegmentModel {
public:
    // What can be chosen from: sequences are cut so that the longest has so many segments, at a time.
    static constexpr int kCandidates = 32;
    FQLA_HOST_DEVICE static constexpr std::uint32_t segments_of_longest(int candidate) {
        if (candidate < 16) return static_cast<std::uint32_t>(candidate) + 1;
        const int octave = candidate / 8 - 1;
        return static_cast<std::uint32_t>(9 + candidate % 8) << octave;
    }

    FQLA_HOST_DEVICE static std::int32_t segment_chunks(const SegmentCosts& costs, std::uint32_t longest,
                                                        int candidate) {
        const std::uint32_t segments = segments_of_longest(candidate);
        const auto chunks = static_cast<std::int32_t>((longest + segments - 1) / segments);
        return chunks < costs.least ? costs.least : chunks > costs.most ? costs.most : chunks;
    }

    // How long a walk takes by one of its launches, if there is such a kernel.
    FQLA_HOST_DEVICE static float walk_time(const SegmentCosts& costs, const SegmentCounts& counts,
                                            std::int32_t segment_chunks, int walk, int launch) {
        const WalkLaunch& it = costs.walks[walk][launch];
        if (it.step <= 0) return kNoSuchKernel;
        if (walk < SegmentCosts::kOfAll) return time_of_all(costs, it, counts, segment_chunks);
        return counts.cut > 0 ? time_of_cut(costs, it, counts, segment_chunks) : 0;
    }
    static constexpr float kNoSuchKernel = -1.0f;

    // How long everything takes that depends on the choice, and which launches it needs. times(walk, launch): as of
    // walk_time().
    template <class Times>
    FQLA_HOST_DEVICE static float time_of_walks(const SegmentCosts& costs, const SegmentCounts& counts,
                                                std::int32_t segment_chunks, Times&& times, std::uint32_t& launches) {
        float sum = 0, walked[2] = {0, 0};  // outputs, ends
        int outputs = 0;                    // their launch
        launches = 0;
        const int walks = counts.cut > 0 ? SegmentCosts::kWalks : SegmentCosts::kOfAll;
        for (int walk = 0; walk < walks; ++walk) {
            const float first = times(walk, 0), second = times(walk, 1);
            if (first < 0 && second < 0) continue;
            const int best = first < 0 || (second >= 0 && second < first) ? 1 : 0;
            const float least = best == 0 ? first : second;
            sum += least;
            launches |= SegmentCosts::bit(walk, best);
            if (walk == 0) walked[0] = least, outputs = best;
            if (walk == SegmentCosts::kOfAll) walked[1] = least;
        }
        if (counts.cut == 0) return sum;
        const float cuts = static_cast<float>((counts.longest - 1) / static_cast<std::uint32_t>(segment_chunks));
        const float carried = share_of_carried(costs, counts);
        const float rounds = static_cast<float>(counts.cut) * costs.carry_share * carried;
        const float carry = costs.carry_step * cuts * (rounds > 1 ? rounds : 1);
        if (counts.forgetful == 0) return sum + costs.carry + carry;
        const WalkLaunch& it = costs.walks[0][outputs];
        const float windows = time_of_windows(costs, counts, it);
        if (carried <= 0) return walked[0] + windows;
        // What the other heads have to do is done beside the ends and the carry, where these leave room. Carries wait
        // for the ends in places of their own. Outputs that wait for the carry come behind it.
        const float place = rounds < 1 ? rounds : 1, before = costs.carry + carry;
        const float all = static_cast<float>(counts.segments) * static_cast<float>(costs.heads) *
                          static_cast<float>(it.blocks) * it.share;
        const float single = it.step * static_cast<float>(segment_chunks) +
                             it.start * (1 - kAhead * share_that_waits(all, carried, place));
        const float last = carried * walked[0] > single ? carried * walked[0] : single;
        const float taken = share_of_ends(costs, counts) + rounds;
        const float beside = walked[0] + (taken < 1 ? taken : 1) * walked[1] + before * place;
        const float behind = walked[1] + before + last;
        return windows + (beside > behind ? beside : behind);
    }

    // The same for all launches that there are.
    FQLA_HOST_DEVICE static float time(const SegmentCosts& costs, const SegmentCounts& counts,
                                       std::int32_t segment_chunks, std::uint32_t& launches) {
        const auto times = [&](int walk, int launch) { return walk_time(costs, counts, segment_chunks, walk, launch); };
        return time_of_walks(costs, counts, segment_chunks, times, launches);
    }

    // A cut has to gain something: for the launches that it takes; and where windows are looked for, what it takes is
    // less sure. (With 0.97 there too, four sequences of 2,048 tokens and 8 heads took 9 % longer than whole.)
    FQLA_HOST_DEVICE static constexpr float gain(const SegmentCosts& costs) {
        return costs.windows > 0 ? 0.88f : 0.97f;
    }

private:
    static constexpr float kRounding = 1e-3f;
    // Of what a block takes before its first chunk, what it has done when its start state comes, if it has waited.
    static constexpr float kAhead = 0.75f;

    // Of the outputs that wait for the carry, the share whose blocks can: there are places besides those of the carry
    // and of outputs that wait for nothing. `all`: outputs, in all places there are.
    static FQLA_HOST_DEVICE float share_that_waits(float all, float carried, float carries) {
        const float left = 1 - carries - (1 - carried) * all;
        return left <= 0 ? 0 : left < carried * all ? left / (carried * all) : 1;
    }

    // A block finds one at a time; those behind the first have their code there already.
    static constexpr float kAnotherWindow = 0.4f;
    static FQLA_HOST_DEVICE float time_of_windows(const SegmentCosts& costs, const SegmentCounts& counts,
                                                  const WalkLaunch& it) {
        const float rounds = static_cast<float>(counts.cuts) * static_cast<float>(costs.heads) * it.share;
        return costs.windows * (rounds > 1 ? 1 + kAnotherWindow * (rounds - 1) : 1);
    }

    static FQLA_HOST_DEVICE float share_of_carried(const SegmentCosts& costs, const SegmentCounts& counts) {
        return 1 - static_cast<float>(counts.forgetful) / static_cast<float>(costs.heads);
    }

    static FQLA_HOST_DEVICE float rounds_of(float blocks, const WalkLaunch& it) {
        return ceilf(blocks * it.share - kRounding);
    }

    // Blocks of full length come in rounds. Shorter ones fill what the last round leaves; those that find no place
    // there come in rounds of their own, which overlap when there are many.
    static FQLA_HOST_DEVICE float time_of_all(const SegmentCosts& costs, const WalkLaunch& it,
                                              const SegmentCounts& counts, std::int32_t segment_chunks) {
        const float each = static_cast<float>(costs.heads) * static_cast<float>(it.blocks);
        const float blocks = static_cast<float>(counts.segments) * each * it.share;
        // NOTE: all segments are taken for as long as those of most sequences' middle.
        const float warm = static_cast<float>(counts.cuts) * static_cast<float>(counts.warm);
        const float longer =
            counts.segments > 0 ? warm / (static_cast<float>(costs.heads) * static_cast<float>(counts.segments)) : 0;
        const float length = static_cast<float>(segment_chunks) + longer;
        const auto longest = static_cast<float>(counts.longest);
        const float full_rounds = rounds_of(static_cast<float>(counts.full) * each, it);
        float chunks = full_rounds * length;
        if (blocks > full_rounds) {
            const auto shorter = static_cast<float>(counts.segments - counts.full);
            const float rest = static_cast<float>(counts.chunks) -
                               static_cast<float>(counts.full) * static_cast<float>(segment_chunks) + shorter * longer;
            const float over = blocks - full_rounds;
            chunks += (over > 2 ? over : ceilf(over - kRounding)) * rest / shorter;
        }
        if (chunks < length && chunks < longest) chunks = length < longest ? length : longest;
        const float even = (static_cast<float>(counts.chunks) * each + warm * static_cast<float>(it.blocks)) * it.share;
        if (even > chunks) chunks = even;
        return it.step * chunks + it.start * (blocks > 1 ? blocks : 1);
    }

    static FQLA_HOST_DEVICE float blocks_of_cut(const SegmentCosts& costs, const WalkLaunch& it,
                                                const SegmentCounts& counts) {
        return static_cast<float>(costs.heads) * share_of_carried(costs, counts) *
               (static_cast<float>(counts.cuts) * static_cast<float>(it.blocks) -
                static_cast<float>(counts.cut) * static_cast<float>(it.transition_blocks));
    }
    // All of these have full length.
    static FQLA_HOST_DEVICE float time_of_cut(const SegmentCosts& costs, const WalkLaunch& it,
                                              const SegmentCounts& counts, std::int32_t segment_chunks) {
        return rounds_of(blocks_of_cut(costs, it, counts), it) *
               (it.step * static_cast<float>(segment_chunks) + it.start);
    }
    // Of all places, for as long as the ends take.
    static FQLA_HOST_DEVICE float share_of_ends(const SegmentCosts& costs, const SegmentCounts& counts) {
        const WalkLaunch& first = costs.walks[SegmentCosts::kOfAll][0];
        const WalkLaunch& it = first.step > 0 ? first : costs.walks[SegmentCosts::kOfAll][1];
        const float blocks = blocks_of_cut(costs, it, counts), rounds = rounds_of(blocks, it);
        return rounds > 0 ? blocks * it.share / rounds : 0;
    }
};

}  // namespace flashqla::cuda
