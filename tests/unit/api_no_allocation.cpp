// The run functions allocate nothing when they succeed. Counts every operator new of this executable.
#include <atomic>
#include <cstdlib>
#include <new>

#include "api_setup.hpp"

namespace {

std::atomic<long> allocations{0};

void* counted(std::size_t bytes, std::size_t alignment) {
    allocations.fetch_add(1, std::memory_order_relaxed);
    // aligned_alloc wants a multiple of the alignment.
    void* data = std::aligned_alloc(alignment, (bytes + alignment) / alignment * alignment);
    if (data == nullptr) throw std::bad_alloc();
    return data;
}

}  // namespace

void* operator new(std::size_t bytes) { return counted(bytes, alignof(std::max_align_t)); }
void* operator new[](std::size_t bytes) { return counted(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t a) { return counted(bytes, static_cast<std::size_t>(a)); }
void* operator new[](std::size_t bytes, std::align_val_t a) { return counted(bytes, static_cast<std::size_t>(a)); }
void operator delete(void* data) noexcept { std::free(data); }
void operator delete[](void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }
void operator delete[](void* data, std::size_t) noexcept { std::free(data); }
void operator delete(void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete[](void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete(void* data, std::size_t, std::align_val_t) noexcept { std::free(data); }
void operator delete[](void* data, std::size_t, std::align_val_t) noexcept { std::free(data); }

namespace flashqla::test {
namespace {

class ApiNoAllocation : public testing::TestWithParam<std::string> {
protected:
    static PlanOptions options() {
        PlanOptions o;
        o.backend = GetParam();
        return o;
    }
    template <class Setup>
    static void expect_none(const Setup& setup) {
        expect_ok(setup.run());  // once before, for what the runtime sets up at its first use
        const long before = allocations.load();
        const Status status = setup.run();
        const long after = allocations.load();
        expect_ok(status);
        EXPECT_EQ(after - before, 0);
    }
};

TEST_P(ApiNoAllocation, Forward) {
    expect_none(ForwardSetup(fixed_problem(), options()));
    ForwardSetup pooled(packed_problem(), options());
    pooled.args.initial_state = pooled.args.final_state = pooled.m.whole_pool();
    const std::vector<std::int32_t> read = {7, -1, 2}, write = {3, 1, 2};
    pooled.args.state_indices = offsets(read);
    pooled.args.state_indices_out = offsets(write);
    expect_none(pooled);
}

TEST_P(ApiNoAllocation, Backward) {
    expect_none(BackwardSetup(fixed_problem(), options()));
    expect_none(BackwardSetup(packed_problem(), options()));
}

TEST_P(ApiNoAllocation, Decode) {
    expect_none(DecodeSetup(fixed_problem(1), options()));
    DecodeSetup verify(fixed_problem(3), options());
    const std::vector<std::int32_t> slots = {0, 1, 2, 3, 4, 5};
    verify.args.state_indices = tensor(slots.data(), DType::i32, {2, 3});
    verify.args.intermediate_states = verify.m.all_steps(3);
    expect_none(verify);
}

INSTANTIATE_TEST_SUITE_P(Of, ApiNoAllocation, testing::ValuesIn(backend_list()),
                         [](const auto& name) { return name.param; });

TEST(ApiNoAllocationSelf, TheCounterCounts) {
    const ForwardSetup s(fixed_problem());
    const long before = allocations.load();
    const Status status = forward(s.plan, {}, s.scratch.get());
    EXPECT_FALSE(status.ok());
    EXPECT_GT(allocations.load(), before);  // an error sentence
}

}  // namespace
}  // namespace flashqla::test
