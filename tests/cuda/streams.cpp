// One plan at work on two streams at once and on several threads at once, each with its own tensors and workspace: the
// bits of a call by itself.

#include <atomic>
#include <thread>

#include "gpu_test.hpp"

namespace {

using namespace flashqla;
using namespace flashqla::gpu_test;

constexpr int kRounds = 20;

struct Lane {
    std::unique_ptr<Setup> setup;
    CudaStream stream;
    std::vector<Bytes> alone;
};

// Lanes of the same problem with other numbers; empty when it is not supported.
std::vector<std::unique_ptr<Lane>> lanes_of(const std::string& line, int count) {
    std::vector<std::unique_ptr<Lane>> lanes;
    for (int i = 0; i < count; ++i) {
        auto lane = std::make_unique<Lane>();
        lane->setup = Setup::make(line + ",seed=" + std::to_string(i + 1));
        if (!lane->setup) return {};
        lane->setup->reset();
        lane->alone = lane->setup->eager(line);
        lanes.push_back(std::move(lane));
    }
    return lanes;
}

// The plan of the first lane on another lane's tensors.
Status submit(const Plan& plan, Lane& lane) { return lane.setup->submit({lane.stream.handle}, plan); }

void two_streams(const std::string& line) {
    std::vector<std::unique_ptr<Lane>> lanes = lanes_of(line, 2);
    if (lanes.empty()) return;
    for (auto& lane : lanes) lane->setup->reset();
    for (int round = 0; round < kRounds; ++round) {
        for (auto& lane : lanes) expect(submit(lanes[0]->setup->plan(), *lane), line);
    }
    for (auto& lane : lanes) {
        lane->stream.wait();
        expect_same(lane->alone, lane->setup->fetch(), line + ", two streams");
    }
}

void threads(const std::string& line) {
    std::vector<std::unique_ptr<Lane>> lanes = lanes_of(line, 4);
    if (lanes.empty()) return;
    for (auto& lane : lanes) lane->setup->reset();
    std::atomic<int> refused{0};
    std::vector<std::thread> running;
    for (auto& lane : lanes) {
        running.emplace_back([&, mine = lane.get()] {
            for (int round = 0; round < kRounds; ++round) {
                // Every other call through a plan that this thread has just made.
                const Result<Plan> own = cases::plan_of(mine->setup->the_case());
                const bool use_own = round % 2 == 1;
                if (!own.ok() || !submit(use_own ? own.value() : lanes[0]->setup->plan(), *mine).ok()) refused += 1;
            }
            mine->stream.wait();
        });
    }
    for (std::thread& thread : running) thread.join();
    expect(refused == 0, line + ", threads: " + std::to_string(refused) + " calls were refused");
    for (auto& lane : lanes) expect_same(lane->alone, lane->setup->fetch(), line + ", threads");
}

void body() {
    for (const char* line : {
             "fwd:lens=700+37+0+163,hk4,hv8,bf16,g=published,h0",
             "fwd:b2,t200,hk2,hv4,f32,h0,layout=vk",
             "bwd:lens=300+37+0+163,hk4,hv8,bf16,g=published,h0",
             // Nothing in place: a state that is updated would differ from call to call.
             "dec:b16,t4,hk4,hv8,bf16,pool=16,nocommit",
             "dec:b16,t4,hk4,hv8,bf16,pool=40,verify=buffer,accepted=0x16",
         }) {
        two_streams(line);
        threads(line);
    }
}

}  // namespace

int main() { return run("streams", body); }
