// A block of GPU threads as fibers of one thread of the host. Lanes of a warp run one after another until they meet;
// warps in random order, so that a missing barrier has a chance to show. Shared memory starts as NaNs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

namespace emulator {

struct Index {
    unsigned x = 0, y = 0, z = 0;
};
extern thread_local Index thread_index, block_index, block_size, grid_size;

inline constexpr std::size_t kSharedBytes = 227 << 10;  // of a block, as on sm_90
extern std::byte* const shared_memory;                  // kSharedBytes, 1,024-byte aligned

// Runs every block of a grid to its end, one after another in random order: a block that needs what another one writes,
// or overwrites what another one has yet to read, has a chance to show. A deadlock, a misaligned copy or too much
// shared memory ends the process with a sentence: these are faults of a kernel, and there is nobody to return them to.
void run_grid(unsigned blocks, unsigned threads, std::size_t shared_bytes, const std::function<void()>& kernel);

// Runs a grid now, or when the graph that is being recorded by this thread is launched. The kernel has to hold its
// arguments by value.
void submit(unsigned blocks, unsigned threads, std::size_t shared_bytes, std::function<void()> kernel);

[[noreturn]] void fail(const char* sentence);

// What a lane brings to a meeting of its warp, and what it takes away.
struct Lane {
    std::uint32_t in[16];
    std::uint32_t out[16];
};
Lane& my_lane();
inline unsigned lane_index() { return thread_index.x % 32; }

// Waits until all 32 lanes of the warp are here; the last one calls act(lanes).
void meet(void (*act)(Lane*));
// Waits until all threads of the block that have not ended are here.
void barrier();

// cp.async: performed when waited for, at the latest possible moment.
void copy_16_async(std::uint32_t to, const void* from, bool inside);
void copies_commit();
void copies_wait(int left);

// What happens some time later, at the latest when nobody can go on without it.
void later(std::function<void()> act);
// Everything that this thread has asked for with copy_16_async(), then `after`; some time later.
void after_copies(std::function<void()> after);
// Waits until `done` says so.
void wait_until(const std::function<bool()>& done);
// Something has changed that another thread may wait for.
void something_changed();
// Waits for `threads` threads at a barrier of that number, or arrives there and goes on.
void barrier(unsigned number, unsigned threads);
void arrive(unsigned number, unsigned threads);

// Products of a lane: asked for, committed in groups, performed when waited for.
void product(std::function<void()> act);
void products_commit();
void products_wait(int left);

// x of lane `source`.
template <class T>
T from_lane(T x, unsigned source) {
    static_assert(sizeof(T) <= 8);
    Lane& lane = my_lane();
    lane.in[0] = source;
    std::memcpy(&lane.in[1], &x, sizeof(T));
    meet([](Lane* lanes) {
        for (int i = 0; i < 32; ++i) std::memcpy(lanes[i].out, &lanes[lanes[i].in[0] % 32].in[1], 8);
    });
    std::memcpy(&x, lane.out, sizeof(T));
    return x;
}

}  // namespace emulator
