// Where the CUDA plans cut sequences: the model alone, on made-up costs.
#include "cuda/segment_cost.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace flashqla::cuda {
namespace {

// One walk over all segments and one over those that a cut adds, on a GPU with 100 places.
SegmentCosts costs_of(std::int32_t heads) {
    SegmentCosts costs;
    costs.walks[0][0] = {3.0f, 0.0f, 2, 0, 0.01f};
    costs.walks[0][1] = {4.0f, 0.0f, 1, 0, 0.01f};
    costs.walks[SegmentCosts::kOfAll][0] = {2.0f, 0.0f, 4, 2, 0.01f};
    costs.carry = 10.0f;
    costs.carry_step = 2.0f;
    costs.carry_share = 0.25f;
    costs.heads = heads;
    costs.most = 1 << 20;
    return costs;
}

SegmentCounts counts_of(const std::vector<std::uint32_t>& lengths, std::uint32_t segment_chunks) {
    SegmentCounts counts;
    for (const std::uint32_t length : lengths) {
        counts.chunks += length;
        counts.longest = std::max(counts.longest, length);
        counts.add(1, length, segment_chunks);
    }
    return counts;
}

float time_of(const SegmentCosts& costs, const std::vector<std::uint32_t>& lengths, std::int32_t segment_chunks,
              std::uint32_t* launches = nullptr) {
    std::uint32_t ignored;
    return SegmentModel::time(costs, counts_of(lengths, static_cast<std::uint32_t>(segment_chunks)), segment_chunks,
                              launches ? *launches : ignored);
}

TEST(CudaSegments, CountsEverySequence) {
    const SegmentCounts counts = counts_of({10, 4, 0, 5}, 4);
    EXPECT_EQ(counts.chunks, 19u);
    EXPECT_EQ(counts.longest, 10u);
    EXPECT_EQ(counts.segments, 3u + 1 + 0 + 2);
    EXPECT_EQ(counts.full, 2u + 1 + 0 + 1);
    EXPECT_EQ(counts.cuts, 2u + 0 + 0 + 1);
    EXPECT_EQ(counts.cut, 2u);
}

TEST(CudaSegments, CandidatesAscendFromOneSegment) {
    EXPECT_EQ(SegmentModel::segments_of_longest(0), 1u);
    for (int i = 1; i < SegmentModel::kCandidates; ++i) {
        EXPECT_GT(SegmentModel::segments_of_longest(i), SegmentModel::segments_of_longest(i - 1));
    }
    SegmentCosts costs = costs_of(1);
    EXPECT_EQ(SegmentModel::segment_chunks(costs, 100, 0), 100);
    EXPECT_EQ(SegmentModel::segment_chunks(costs, 100, 2), 34);
    costs.least = 40, costs.most = 60;
    EXPECT_EQ(SegmentModel::segment_chunks(costs, 100, 0), 60);
    EXPECT_EQ(SegmentModel::segment_chunks(costs, 100, 2), 40);
}

TEST(CudaSegments, OnePieceTakesAsLongAsTheLongest) {
    std::uint32_t launches = 0;
    EXPECT_FLOAT_EQ(time_of(costs_of(2), {100, 10}, 100, &launches), 300.0f);
    EXPECT_EQ(launches, SegmentCosts::bit(0, 0));
}

TEST(CudaSegments, ManyHeadsTakeTheLaunchThatDoesMost) {
    std::uint32_t launches = 0;
    // 200 narrow blocks take two rounds, 100 wide ones a longer one.
    EXPECT_FLOAT_EQ(time_of(costs_of(100), {50}, 50, &launches), 200.0f);
    EXPECT_EQ(launches, SegmentCosts::bit(0, 1));
}

TEST(CudaSegments, CutsArePaidFor) {
    // Four segments: the outputs' walk, the ends of three without one transition, the carry over three cuts.
    std::uint32_t launches = 0;
    EXPECT_FLOAT_EQ(time_of(costs_of(2), {100}, 25, &launches), 25 * 3.0f + 25 * 2.0f + 10.0f + 3 * 2.0f);
    EXPECT_EQ(launches, SegmentCosts::bit(0, 0) | SegmentCosts::bit(SegmentCosts::kOfAll, 0));
    // A sequence that is short enough as it is pays nothing, and nothing is paid for it.
    EXPECT_FLOAT_EQ(time_of(costs_of(2), {100, 25}, 25), time_of(costs_of(2), {100}, 25));
}

TEST(CudaSegments, HeadsThatForgetNeedNoCarry) {
    SegmentCosts costs = costs_of(2);
    costs.windows = 1.0f;
    costs.most_window = 12;
    SegmentCounts counts = counts_of({100}, 25);
    std::uint32_t launches = 0;
    const auto time = [&] { return SegmentModel::time(costs, counts, 25, launches); };
    const float carried = time();
    EXPECT_FLOAT_EQ(carried, 25 * 3.0f + 25 * 2.0f + 10.0f + 3 * 2.0f);
    // One of two heads walks two chunks before each cut: three quarters of the segments, half of the heads. The other's
    // segments come behind its carry.
    counts.forgetful = 1, counts.warm = 2;
    EXPECT_FLOAT_EQ(time(), 25 * 2.0f + 1.0f + 10.0f + 3 * 2.0f + 25 * 3.0f);
    // The more there is to do for the first, the less that matters, but for the places that ends and carry take.
    counts.warm = 60;
    EXPECT_FLOAT_EQ(time(), 1.0f + (25 + 22.5f) * 3.0f + 25 * 2.0f * (0.1f + 0.125f) + 16.0f / 8);
    counts.forgetful = 2, counts.warm = 4;
    EXPECT_FLOAT_EQ(time(), 26.5f * 3.0f + 1.0f);
    EXPECT_LT(time(), carried);
}

}  // namespace
}  // namespace flashqla::cuda
