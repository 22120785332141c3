// What launches remember of the permissions they were given, with a made-up GPU.
#include "cuda/host/grants.hpp"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

namespace flashqla::cuda {
namespace {

constexpr int kRefused = 1, kOther = 2;
constexpr std::size_t kFew = 32 << 10, kMany = 100 << 10, kMost = 200 << 10;

// A GPU that launches what it has permitted.
struct MadeUpGpu {
    std::atomic<std::size_t> permitted{SharedMemoryGrants::kWithoutAsking};
    std::atomic<int> asked{0}, launches{0};

    SharedMemoryGrants::Outcome launch(SharedMemoryGrants& grants, const void* kernel, std::size_t bytes,
                                       int device = 0) {
        return grants.launch(
            kernel, device, bytes, kRefused,
            [&](std::size_t size) {
                ++asked;
                if (size > kMost) return kOther;
                permitted = size;
                return 0;
            },
            [&] {
                ++launches;
                return bytes <= permitted ? 0 : kRefused;
            });
    }
};

struct CudaGrants : testing::Test {
    std::unique_ptr<SharedMemoryGrants> grants = std::make_unique<SharedMemoryGrants>();
    MadeUpGpu gpu;
    alignas(16) char kernels[4096][16];
};

TEST_F(CudaGrants, LittleMemoryNeedsNone) {
    EXPECT_EQ(gpu.launch(*grants, kernels[0], kFew).error, 0);
    EXPECT_EQ(gpu.asked, 0);
    EXPECT_EQ(grants->granted(kernels[0], 0), 0u);
}

TEST_F(CudaGrants, IsAskedForOnce) {
    for (int i = 0; i < 5; ++i) EXPECT_EQ(gpu.launch(*grants, kernels[0], kMany).error, 0);
    EXPECT_EQ(gpu.asked, 1);
    EXPECT_EQ(gpu.launches, 5);
}

TEST_F(CudaGrants, GrowsAndDoesNotShrink) {
    for (const std::size_t bytes : {kMany, kMost, kMany, kMost}) {
        EXPECT_EQ(gpu.launch(*grants, kernels[0], bytes).error, 0);
    }
    EXPECT_EQ(gpu.asked, 2);
    EXPECT_EQ(gpu.permitted, kMost);
}

TEST_F(CudaGrants, EachKernelAndDeviceHasItsOwn) {
    EXPECT_EQ(gpu.launch(*grants, kernels[0], kMost).error, 0);
    EXPECT_EQ(grants->granted(kernels[1], 0), 0u);
    EXPECT_EQ(grants->granted(kernels[0], 1), 0u);
    EXPECT_EQ(gpu.launch(*grants, kernels[0], kMany, 100).error, 0);
    EXPECT_EQ(grants->granted(kernels[0], 100), kMany);
    EXPECT_EQ(grants->granted(kernels[0], 0), kMost);
}

TEST_F(CudaGrants, IsAskedForAgainAfterAReset) {
    EXPECT_EQ(gpu.launch(*grants, kernels[0], kMost).error, 0);
    gpu.permitted = SharedMemoryGrants::kWithoutAsking;
    EXPECT_EQ(gpu.launch(*grants, kernels[0], kMany).error, 0);
    EXPECT_EQ(gpu.asked, 2);
    EXPECT_EQ(gpu.permitted, kMost);  // which another thread may rely on
    EXPECT_EQ(gpu.launches, 3);
}

TEST_F(CudaGrants, ErrorsComeBack) {
    const SharedMemoryGrants::Outcome asking = gpu.launch(*grants, kernels[0], kMost + 1);
    EXPECT_EQ(asking.error, kOther);
    EXPECT_TRUE(asking.of_asking);
    EXPECT_EQ(gpu.launches, 0);
    EXPECT_EQ(grants->granted(kernels[0], 0), 0u);
    int launches = 0;
    const auto launch = [&](int error) {
        return grants->launch(
            kernels[0], 0, kMany, kRefused, [](std::size_t) { return 0; }, [&] { return ++launches, error; });
    };
    EXPECT_EQ(launch(kOther).error, kOther);
    EXPECT_EQ(launches, 1);
    const SharedMemoryGrants::Outcome refused = launch(kRefused);
    EXPECT_EQ(refused.error, kRefused);
    EXPECT_FALSE(refused.of_asking);
    EXPECT_EQ(launches, 3);
}

TEST_F(CudaGrants, MoreKernelsThanThereIsRoomFor) {
    for (int turn = 0; turn < 2; ++turn) {
        for (const auto& kernel : kernels) {
            gpu.permitted = SharedMemoryGrants::kWithoutAsking;
            EXPECT_EQ(gpu.launch(*grants, kernel, kMany).error, 0);
        }
    }
}

// Every thread launches with what it needs and is never refused: nobody takes a grant back.
TEST_F(CudaGrants, ManyThreads) {
    constexpr int kKernels = 40;
    std::array<MadeUpGpu, kKernels> each;
    std::atomic<int> refused{0};
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 8; ++t) {
        threads.emplace_back([&, t] {
            for (unsigned i = 0; i < 20 * kKernels; ++i) {
                const unsigned k = (i + 5 * t) % kKernels;
                const std::size_t bytes = (i + t) % 3 == 0 ? kMost : kMany;
                refused += each[k].launch(*grants, kernels[k], bytes).error != 0;
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(refused, 0);
    for (MadeUpGpu& kernel : each) {
        EXPECT_LE(kernel.asked, 2);
        EXPECT_EQ(kernel.launches, 8 * 20);
    }
}

}  // namespace
}  // namespace flashqla::cuda
