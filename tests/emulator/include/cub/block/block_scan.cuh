// What src/cuda uses of cub::BlockScan.
#pragma once

#include "block.hpp"

namespace cub {

template <class T, int kThreads>
class BlockScan {
public:
    struct TempStorage {
        T x[kThreads];
    };
    explicit BlockScan(TempStorage& storage) : x_(storage.x) {}

    void ExclusiveSum(T in, T& before, T& total) {
        x_[emulator::thread_index.x] = in;
        emulator::barrier();
        before = total = T{};
        for (unsigned i = 0; i < kThreads; ++i) {
            if (i < emulator::thread_index.x) before += x_[i];
            total += x_[i];
        }
        emulator::barrier();
    }

private:
    T* x_;
};

}  // namespace cub
