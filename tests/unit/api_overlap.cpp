// Overlap of views: slices of packed tensors are apart, everything that touches is found.
#include "api/overlap.hpp"

#include <random>
#include <set>

#include "api_setup.hpp"

namespace flashqla::test {
namespace {

Extent extent_of(const TensorView& view) {
    Extent extent;
    EXPECT_TRUE(make_extent(view, extent));
    return extent;
}

std::set<std::int64_t> bytes_of(const Extent& e) {
    std::set<std::int64_t> bytes;
    if (e.empty()) return bytes;
    std::int64_t index[kMaxRank] = {};
    for (;;) {
        std::int64_t at = e.base;
        for (std::int32_t i = 0; i < e.rank; ++i) at += index[i] * e.stride[i];
        for (std::int64_t b = 0; b < e.element; ++b) bytes.insert(at + b);
        std::int32_t i = 0;
        while (i < e.rank && ++index[i] == e.size[i]) index[i++] = 0;
        if (i == e.rank) return bytes;
    }
}

bool really_overlap(const Extent& a, const Extent& b) {
    const std::set<std::int64_t> in_a = bytes_of(a);
    for (const std::int64_t byte : bytes_of(b)) {
        if (in_a.count(byte)) return true;
    }
    return false;
}

// Random small views: "apart" is never wrong, neither is "elements have places of their own".
TEST(ApiOverlap, AgreesWithCountingBytes) {
    std::mt19937 random(7);
    const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
    const auto any_view = [&] {
        TensorView view;
        view.dtype = pick(0, 1) ? DType::f32 : DType::bf16;
        view.rank = pick(1, 4);
        view.data = reinterpret_cast<void*>(static_cast<std::uintptr_t>(4096 + 2 * pick(0, 40)));
        for (std::int32_t i = 0; i < view.rank; ++i) {
            view.shape[i] = pick(0, 12) == 0 ? 0 : pick(1, 4);
            view.stride[i] = pick(0, 3) == 0 ? pick(-20, 20) : 1 << pick(0, 5);
        }
        return view;
    };
    int apart = 0, spared = 0;
    for (int i = 0; i < 20000; ++i) {
        const Extent a = extent_of(any_view()), b = extent_of(any_view());
        const bool truth = really_overlap(a, b);
        if (!overlap(a, b)) {
            ++apart;
            if (a.low < b.high && b.low < a.high) ++spared;
            ASSERT_FALSE(truth) << "case " << i;
        }
        ASSERT_EQ(overlap(a, b), overlap(b, a));
        std::int64_t places = a.empty() ? 0 : a.element;
        for (std::int32_t d = 0; d < a.rank && !a.empty(); ++d) places *= a.size[d];
        if (!overlaps_itself(a)) {
            ASSERT_EQ(bytes_of(a).size(), static_cast<std::size_t>(places)) << "case " << i;
        }
    }
    EXPECT_GT(apart, 1000);
    EXPECT_GT(spared, 50);  // the test is not about disjoint ranges alone
}

TEST(ApiOverlap, SlicesOfAPackedTensor) {
    // [T, q | k | v | o] for Hk 2, Hv 4, K 8, V 6: rows of 16 + 16 + 24 + 24 floats
    const Problem p = fixed_problem();
    ForwardSetup s(p);
    std::vector<float> packed(2 * 8 * 80, 0.25f);
    const auto slice = [&](std::int64_t offset, std::int64_t heads, std::int64_t size) {
        return tensor(packed.data() + offset, DType::f32, {2, 8, heads, size}, {8 * 80, 80, size, 1});
    };
    s.args.q = slice(0, 2, 8);
    s.args.k = slice(16, 2, 8);
    s.args.v = slice(32, 4, 6);
    s.args.o = slice(56, 4, 6);
    expect_ok(s.run());
    s.args.o = slice(55, 4, 6);
    s.expect_invalid("output o overlaps input v");
    s.args.o = slice(57, 4, 6);  // the last element of each row falls on the next row's q
    s.expect_invalid("output o overlaps input q");
}

TEST(ApiOverlap, HeadsInterleaved) {
    // v and o side by side in each head: [B,T,Hv,(v,o)]
    ForwardSetup s(fixed_problem());
    std::vector<float> pairs(2 * 8 * 4 * 12, 0.25f);
    s.args.v = tensor(pairs.data(), DType::f32, {2, 8, 4, 6}, {8 * 48, 48, 12, 1});
    s.args.o = tensor(pairs.data() + 6, DType::f32, {2, 8, 4, 6}, {8 * 48, 48, 12, 1});
    expect_ok(s.run());
    s.args.o.data = pairs.data() + 5;
    s.expect_invalid("output o overlaps input v");
}

TEST(ApiOverlap, OutputsAndInputs) {
    ForwardSetup s(fixed_problem());
    const ForwardArgs good = s.args;
    s.args.o = s.args.v;
    s.expect_invalid("output o overlaps input v");
    s.args = good;
    s.args.final_state.data = s.m.o.data();
    s.m.o.resize(4096);
    s.args.o.data = s.args.final_state.data = s.m.o.data();
    s.expect_invalid("output final_state overlaps output o");
    s.args = good;
    s.args.o.data = s.m.o.data();
    s.args.final_state = s.args.initial_state;  // in place
    expect_ok(s.run());
    std::vector<float> shifted(2 * s.m.initial.size());
    s.args.initial_state.data = shifted.data();
    s.args.final_state.data = shifted.data() + 48;
    s.expect_invalid("output final_state overlaps input initial_state; they may be the same view or apart");
}

}  // namespace
}  // namespace flashqla::test
