// Offsets beyond 2^31 elements: the last rows of huge tensors equal the same rows in small ones. The memory is
// reserved, not used: only the pages with rows in them exist.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <vector>

#include "cases/numbers.hpp"
#include "cases/runner.hpp"
#include "flashqla/flashqla.hpp"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FQLA_TEST_SKIP_HUGE 1  // the shadow memory of a reservation this large does not fit
#endif

namespace flashqla {
namespace {

constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 64;  // elements between rows

class Reserved {
public:
    explicit Reserved(std::int64_t elements) : bytes_(static_cast<std::size_t>(elements) * sizeof(float)) {
        data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    ~Reserved() {
        if (ok()) munmap(data_, bytes_);
    }
    Reserved(const Reserved&) = delete;
    Reserved& operator=(const Reserved&) = delete;
    bool ok() const { return data_ != MAP_FAILED; }
    float* data() const { return static_cast<float*>(data_); }

private:
    std::size_t bytes_;
    void* data_;
};

class BigOffsets : public testing::Test {
protected:
    void SetUp() override {
#ifdef FQLA_TEST_SKIP_HUGE
        GTEST_SKIP() << "not under a sanitizer";
#endif
        if (sizeof(void*) < 8) GTEST_SKIP() << "needs a 64-bit address space";
    }
};

void fill(float* data, std::int64_t count, int stream) {
    for (std::int64_t i = 0; i < count; ++i) data[i] = static_cast<float>(0.2 * cases::Draw(3, stream).normal(i));
}

// case 13: the highest slot of a pool beyond 2^31 elements.
TEST_F(BigOffsets, HighestSlotOfThePool) {
    constexpr std::int64_t kHeads = 2, kDim = 64, kSlots = 4, kState = kHeads * kDim * kDim;
    const Reserved pool(kFar * kSlots);
    if (!pool.ok()) GTEST_SKIP() << "this machine cannot reserve the address space";
    std::vector<float> q(kDim), k(kDim), v(kHeads * kDim), g(kHeads, -0.1f), beta(kHeads, 0.5f), small(kState);
    fill(q.data(), kDim, 1);
    fill(k.data(), kDim, 2);
    fill(v.data(), kHeads * kDim, 3);
    fill(small.data(), kState, 4);
    std::memcpy(pool.data() + (kSlots - 1) * kFar, small.data(), sizeof(float) * kState);

    Problem p;
    p.batch = 1;
    p.tokens = 1;
    p.heads_k = 1;
    p.heads_v = kHeads;
    p.dim_k = kDim;
    p.dim_v = kDim;
    p.io = DType::f32;
    const Plan plan = check(Plan::create(p));
    const cases::Scratch scratch(plan.workspace_bytes(Pass::decode));
    std::vector<float> o_small(kHeads * kDim), o_far(kHeads * kDim);
    const std::int64_t slot = kSlots - 1;
    DecodeArgs args;
    args.q = tensor(q.data(), DType::f32, {1, 1, 1, kDim});
    args.k = tensor(k.data(), DType::f32, {1, 1, 1, kDim});
    args.v = tensor(v.data(), DType::f32, {1, 1, kHeads, kDim});
    args.g = tensor(g.data(), DType::f32, {1, 1, kHeads});
    args.beta = tensor(beta.data(), DType::f32, {1, 1, kHeads});
    args.state = tensor(small.data(), DType::f32, {1, kHeads, kDim, kDim});
    args.o = tensor(o_small.data(), DType::f32, {1, 1, kHeads, kDim});
    check(decode(plan, args, scratch.workspace()));
    args.state = tensor(pool.data(), DType::f32, {kSlots, kHeads, kDim, kDim}, {kFar, kDim * kDim, kDim, 1});
    args.state_indices = tensor(&slot, DType::i64, {1});
    args.o = tensor(o_far.data(), DType::f32, {1, 1, kHeads, kDim});
    check(decode(plan, args, scratch.workspace()));
    EXPECT_EQ(o_small, o_far);
    EXPECT_EQ(std::memcmp(pool.data() + slot * kFar, small.data(), sizeof(float) * kState), 0);
    EXPECT_EQ(pool.data()[0], 0.0f);
    EXPECT_EQ(pool.data()[2 * kFar], 0.0f);
}

// case 13: token rows beyond 2^31 elements.
TEST_F(BigOffsets, LastTokenRows) {
    constexpr std::int64_t kTokens = 5, kHeads = 2, kDim = 32;
    const Reserved far_q(kFar * kTokens), far_v(kFar * kTokens), far_o(kFar * kTokens);
    if (!far_q.ok() || !far_v.ok() || !far_o.ok()) GTEST_SKIP() << "this machine cannot reserve the address space";
    std::vector<float> q(kTokens * kDim), v(kTokens * kHeads * kDim), g(kTokens * kHeads, -0.1f),
        o(kTokens * kHeads * kDim);
    fill(q.data(), kTokens * kDim, 1);
    fill(v.data(), kTokens * kHeads * kDim, 2);
    for (std::int64_t t = 0; t < kTokens; ++t) {
        std::memcpy(far_q.data() + t * kFar, q.data() + t * kDim, sizeof(float) * kDim);
        std::memcpy(far_v.data() + t * kFar, v.data() + t * kHeads * kDim, sizeof(float) * kHeads * kDim);
    }
    Problem p;
    p.batch = 1;
    p.tokens = kTokens;
    p.heads_k = 1;
    p.heads_v = kHeads;
    p.dim_k = kDim;
    p.dim_v = kDim;
    p.io = DType::f32;
    const Plan plan = check(Plan::create(p));
    const cases::Scratch scratch(plan.workspace_bytes(Pass::forward));
    ForwardArgs args;
    args.q = tensor(q.data(), DType::f32, {1, kTokens, 1, kDim});
    args.k = tensor(q.data(), DType::f32, {1, kTokens, 1, kDim});
    args.v = tensor(v.data(), DType::f32, {1, kTokens, kHeads, kDim});
    args.g = tensor(g.data(), DType::f32, {1, kTokens, kHeads});
    args.o = tensor(o.data(), DType::f32, {1, kTokens, kHeads, kDim});
    check(forward(plan, args, scratch.workspace()));
    const auto far = [&](const Reserved& memory, std::int64_t heads) {
        return tensor(memory.data(), DType::f32, {1, kTokens, heads, kDim}, {kTokens * kFar, kFar, kDim, 1});
    };
    args.q = args.k = far(far_q, 1);
    args.v = far(far_v, kHeads);
    args.o = far(far_o, kHeads);
    check(forward(plan, args, scratch.workspace()));
    for (std::int64_t t = 0; t < kTokens; ++t) {
        EXPECT_EQ(std::memcmp(far_o.data() + t * kFar, o.data() + t * kHeads * kDim, sizeof(float) * kHeads * kDim), 0);
    }
}

}  // namespace
}  // namespace flashqla
