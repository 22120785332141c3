// What src/cuda uses of cub::BlockReduce.
#pragma once

#include "block.hpp"

namespace cub {

template <class T, int kThreads>
class BlockReduce {
public:
    struct TempStorage {
        T x[kThreads];
    };
    explicit BlockReduce(TempStorage& storage) : x_(storage.x) {}

    T Sum(T in) {
        x_[emulator::thread_index.x] = in;
        emulator::barrier();
        T total{};
        for (unsigned i = 0; i < kThreads; ++i) total += x_[i];
        emulator::barrier();
        return total;
    }

private:
    T* x_;
};

}  // namespace cub
