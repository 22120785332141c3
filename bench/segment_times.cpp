// What the segments' model says of forced cuts, for bench/fit_segments.py: a line in, a line out. In: the seven
// constants and heads, chunks of the sequence, heads that forget, their chunks before a cut together, chunks of a
// segment. One sequence, K = V = 128, blocks of 128 columns on an H200.
#include <cstdint>
#include <iostream>

#include "cuda/segment_cost.hpp"
#include "cuda/sm90/forward/params.hpp"

int main() {
    using namespace flashqla::cuda;
    constexpr float kMultiprocessors = 132;
    float step, start, ends_step, ends_start, carry, carry_step, windows;
    std::uint32_t heads, chunks, forgetful, warm;
    std::int32_t each;
    while (std::cin >> step >> start >> ends_step >> ends_start >> carry >> carry_step >> windows >> heads >> chunks >>
           forgetful >> warm >> each) {
        SegmentCosts costs;
        costs.heads = static_cast<std::int32_t>(heads);
        costs.walks[0][1] = {step, start, 1, 0, 1 / kMultiprocessors};
        costs.walks[SegmentCosts::kOfAll][1] = {ends_step, ends_start, 2, 1, 1 / kMultiprocessors};
        costs.carry = carry;
        costs.carry_step = carry_step;
        costs.carry_share = static_cast<float>(heads) * 128 / sm90::kCarryColumns / kMultiprocessors;
        costs.windows = windows;
        SegmentCounts counts;
        counts.chunks = counts.longest = chunks;
        counts.forgetful = forgetful;
        counts.warm = warm;
        counts.add(1, chunks, static_cast<std::uint32_t>(each));
        std::uint32_t launches = 0;
        float time = SegmentModel::time(costs, counts, each, launches);
        counts.forgetful = counts.warm = 0;
        const float carried = SegmentModel::time(costs, counts, each, launches);
        std::cout << (carried < time ? carried : time) << '\n';
    }
}
