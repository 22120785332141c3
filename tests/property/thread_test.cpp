// Threads: several inside a call, and several users of one plan. Small enough to run under ThreadSanitizer; the values
// are compared bit by bit with those of one thread.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "cases/compare.hpp"
#include "cases/grammar.hpp"
#include "cases/runner.hpp"

namespace flashqla::cases {
namespace {

Case case_of(const std::string& line) {
    const Parsed<Case> parsed = parse_case(line);
    EXPECT_TRUE(parsed.ok()) << parsed.error;
    return parsed.value;
}

const char* const kLines[] = {
    "fwd:b3,t200,hk2,hv4,k32,v48,f32,h0,det,strided",
    "fwd:lens=100+0+65+1+3+40,t230,hk2,hv4,k32,v48,bf16,h0,det,ckpt=chunk",
    "fwd:t600,hk1,hv1,k32,v32,f32,h0,split=3,det",
    "bwd:lens=100+0+65+1+3+40,t230,hk2,hv4,k32,v48,f32,gate=raw,h0,det",
    "bwd:t300,hk1,hv3,k32,v32,bf16,h0,split=3,det",
    "dec:b7,hk2,hv4,k32,v48,bf16,pool=9,det",
    "dec:b5,t4,hk2,hv4,k32,v48,f32,verify=buffer,det",
};

class Threads : public testing::TestWithParam<const char*> {};

TEST_P(Threads, FourInsideACallGiveTheBitsOfOne) {
    Case c = case_of(GetParam());
    c.threads = 1;
    const Execution one = execute(c);
    ASSERT_TRUE(one.status.ok()) << one.status.message();
    c.threads = 4;
    for (int repeat = 0; repeat < 3; ++repeat) {
        const Execution four = execute(c);
        ASSERT_TRUE(four.status.ok()) << four.status.message();
        EXPECT_TRUE(four.faults.empty());
        for (const std::string& name : one.instance.outputs) {
            EXPECT_EQ(bit_difference(name, values_of(*four.instance.find(name)), values_of(*one.instance.find(name))),
                      "");
        }
    }
}

TEST_P(Threads, EightUsersOfOnePlan) {
    Case c = case_of(GetParam());
    c.threads = 2;
    const Execution alone = execute(c);
    ASSERT_TRUE(alone.status.ok()) << alone.status.message();
    const Result<Plan> plan = Plan::create(problem_of(c), {}, options_of(c));
    ASSERT_TRUE(plan.ok()) << plan.status().message();

    constexpr int kUsers = 8;
    std::vector<Instance> instances;
    std::vector<Scratch> scratches;
    for (int i = 0; i < kUsers; ++i) {
        instances.push_back(make_instance(c));
        scratches.emplace_back(plan->workspace_bytes(c.pass));
    }
    std::atomic<int> refused{0};
    std::vector<std::thread> users;
    for (int i = 0; i < kUsers; ++i) {
        users.emplace_back([&, i] {
            const auto user = static_cast<std::size_t>(i);
            if (plan->explain().empty()) ++refused;
            if (!call(c, plan.value(), instances[user], scratches[user].workspace()).ok()) ++refused;
        });
    }
    for (std::thread& user : users) user.join();
    EXPECT_EQ(refused, 0);
    for (const Instance& instance : instances) {
        for (const std::string& name : instance.outputs) {
            EXPECT_EQ(bit_difference(name, values_of(*instance.find(name)), values_of(*alone.instance.find(name))), "");
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Lines, Threads, testing::ValuesIn(kLines));

TEST(ThreadErrors, EachThreadHasItsOwn) {
    std::vector<std::thread> users;
    std::atomic<int> wrong{0};
    for (int i = 0; i < 8; ++i) {
        users.emplace_back([&wrong, i] {
            Problem p;
            p.heads_k = p.heads_v = 1;
            p.dim_k = p.dim_v = -i;
            const Result<Plan> plan = Plan::create(p);
            const std::string number = "dim_k is " + std::to_string(-i);
            if (plan.ok() || plan.status().message().find(number) == std::string::npos) ++wrong;
        });
    }
    for (std::thread& user : users) user.join();
    EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace flashqla::cases
