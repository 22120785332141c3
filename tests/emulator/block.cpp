#include "block.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#if !defined(__x86_64__)
#error "the emulator switches fibers with x86-64 instructions"
#endif

// Saves the registers that a call keeps, and goes on where another stack stopped.
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.globl emulator_switch
.type emulator_switch,@function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch,.-emulator_switch
)");

namespace emulator {

thread_local Index thread_index, block_index, block_size, grid_size;

namespace {

struct alignas(1024) SharedMemory {
    std::byte bytes[kSharedBytes];
};
SharedMemory the_shared_memory;

struct Copy {
    std::uint32_t to;
    const void* from;
    bool inside;
};

constexpr std::size_t kStackBytes = 256 << 10;

struct Fiber {
    std::unique_ptr<std::byte[]> stack{new std::byte[kStackBytes]};
    void* stack_pointer = nullptr;
    bool ended = true;
    std::vector<Copy> open;                 // asked for, not committed
    std::vector<std::vector<Copy>> groups;  // committed, not waited for
    std::vector<std::function<void()>> open_products;
    std::vector<std::vector<std::function<void()>>> products;
};

struct NamedBarrier {
    unsigned arrived = 0;
    std::uint64_t passed = 0;
};
NamedBarrier named[16];
std::vector<std::function<void()>> pending;

struct Warp {
    int arrived = 0, alive = 0;
    std::uint64_t meetings = 0;
};

// The block that runs. NOTE: one at a time; kernels are launched by one thread of the host.
std::vector<Fiber> fibers;
std::vector<Lane> lanes;
std::vector<Warp> warps;
int alive = 0, at_barrier = 0;
std::uint64_t barriers = 0, progress = 0;
void* scheduler_stack_pointer = nullptr;
Fiber* current = nullptr;
const std::function<void()>* body = nullptr;

void yield() { emulator_switch(&current->stack_pointer, scheduler_stack_pointer); }

void perform(const std::vector<Copy>& copies) {
    for (const Copy& copy : copies) {
        std::byte* to = shared_memory + copy.to;
        if (!copy.inside) {
            std::memset(to, 0, 16);
            continue;
        }
        if (reinterpret_cast<std::uintptr_t>(copy.from) % 16 != 0)
            fail("cp.async from an address that is no multiple of 16");
        std::memcpy(to, copy.from, 16);
    }
}

void run_thread() {
    (*body)();
    copies_commit();
    copies_wait(0);
    current->ended = true;
    ++progress;
    --warps[thread_index.x / 32].alive;
    --alive;
    if (alive > 0 && at_barrier == alive) {
        at_barrier = 0;
        ++barriers;
    }
    emulator_switch(&current->stack_pointer, scheduler_stack_pointer);
    fail("a thread went on after its end");
}

void start(Fiber& fiber) {
    auto top = reinterpret_cast<std::uintptr_t>(fiber.stack.get() + kStackBytes) & ~std::uintptr_t(15);
    void** at = reinterpret_cast<void**>(top);
    *--at = nullptr;  // where run_thread() would return to; also aligns its stack
    *--at = reinterpret_cast<void*>(&run_thread);
    for (int i = 0; i < 6; ++i) *--at = nullptr;
    fiber.stack_pointer = at;
    fiber.ended = false;
    fiber.open.clear();
    fiber.groups.clear();
    fiber.open_products.clear();
    fiber.products.clear();
}

// Lets the lanes of a warp run until they wait for the rest of the block.
void run_warp(std::size_t warp, std::mt19937& random) {
    for (;;) {
        const std::uint64_t before = progress;
        for (std::size_t lane = 0; lane < 32; ++lane) {
            current = &fibers[32 * warp + lane];
            if (current->ended) continue;
            thread_index = {static_cast<unsigned>(32 * warp + lane), 0, 0};
            emulator_switch(&scheduler_stack_pointer, current->stack_pointer);
        }
        if (progress == before || random() % 16 == 0) return;
    }
}

void run_pending(std::mt19937& random) {
    const std::size_t which = random() % pending.size();
    const std::function<void()> act = std::move(pending[which]);
    pending.erase(pending.begin() + static_cast<std::ptrdiff_t>(which));
    act();
    ++progress;
}

void run_block(std::size_t warp_count, std::size_t shared_bytes, std::mt19937& random) {
    std::memset(shared_memory, 0xff, std::max<std::size_t>(shared_bytes, 1 << 10));
    for (Warp& warp : warps) warp = {0, 32, 0};
    alive = static_cast<int>(32 * warp_count);
    at_barrier = 0;
    for (NamedBarrier& b : named) b = {};
    for (std::size_t i = 0; i < 32 * warp_count; ++i) start(fibers[i]);
    std::vector<std::size_t> order(warp_count);
    for (std::size_t i = 0; i < warp_count; ++i) order[i] = i;
    while (alive > 0) {
        const std::uint64_t before = progress;
        std::shuffle(order.begin(), order.end(), random);
        for (const std::size_t warp : order) {
            run_warp(warp, random);
            if (!pending.empty() && random() % 4 == 0) run_pending(random);
        }
        if (progress == before && !pending.empty()) run_pending(random);
        if (progress == before) fail("the threads of a block wait for each other for ever");
    }
    if (!pending.empty()) fail("a block ends before what it has asked for has come");
    for (const NamedBarrier& b : named)
        if (b.arrived != 0) fail("a block ends while some wait at a named barrier");
}

}  // namespace

std::byte* const shared_memory = the_shared_memory.bytes;

void fail(const char* sentence) {
    std::fprintf(stderr, "emulated GPU: %s (block %u, thread %u)\n", sentence, block_index.x, thread_index.x);
    std::abort();
}

void run_grid(unsigned blocks, unsigned threads, std::size_t shared_bytes, const std::function<void()>& kernel) {
    static std::mt19937 random(1);
    if (shared_bytes > kSharedBytes) fail("a block with more shared memory than there is");
    if (threads % 32 != 0 || threads > 1024)
        fail("a block of a number of threads that is not 32 to 1024 in steps of 32");
    if (fibers.size() < threads) fibers.resize(threads);
    if (lanes.size() < threads) lanes.resize(threads);
    warps.resize(threads / 32);
    block_size = {threads, 1, 1};
    grid_size = {blocks, 1, 1};
    body = &kernel;
    std::vector<unsigned> order(blocks);
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), random);
    for (const unsigned block : order) {
        block_index = {block, 0, 0};
        run_block(threads / 32, shared_bytes, random);
    }
}

Lane& my_lane() { return lanes[thread_index.x]; }

void meet(void (*act)(Lane*)) {
    const unsigned index = thread_index.x / 32;
    Warp& warp = warps[index];
    if (warp.alive != 32) fail("a warp meets after some of its lanes have ended");
    const std::uint64_t meeting = warp.meetings;
    if (++warp.arrived == 32) {
        act(&lanes[32 * index]);
        warp.arrived = 0;
        ++warp.meetings;
        ++progress;
        return;
    }
    while (warp.meetings == meeting) yield();
}

void barrier() {
    const std::uint64_t now = barriers;
    if (++at_barrier == alive) {
        at_barrier = 0;
        ++barriers;
        ++progress;
        return;
    }
    while (barriers == now) yield();
}

void copy_16_async(std::uint32_t to, const void* from, bool inside) {
    if (to % 16 != 0) fail("cp.async to an address that is no multiple of 16");
    current->open.push_back({to, from, inside});
}

void copies_commit() {
    current->groups.push_back(std::move(current->open));
    current->open.clear();
}

void copies_wait(int left) {
    auto& groups = current->groups;
    const auto done = static_cast<std::ptrdiff_t>(groups.size()) - left;
    if (done <= 0) return;
    for (std::ptrdiff_t i = 0; i < done; ++i) perform(groups[static_cast<std::size_t>(i)]);
    groups.erase(groups.begin(), groups.begin() + done);
}

void later(std::function<void()> act) { pending.push_back(std::move(act)); }
void something_changed() { ++progress; }
void wait_until(const std::function<bool()>& done) {
    while (!done()) yield();
}
void after_copies(std::function<void()> after) {
    copies_commit();
    auto groups = std::make_shared<std::vector<std::vector<Copy>>>(std::move(current->groups));
    current->groups.clear();
    later([groups, after] {
        for (const auto& group : *groups) perform(group);
        after();
    });
}
void arrive(unsigned number, unsigned threads) {
    NamedBarrier& b = named[number];
    if (++b.arrived < threads) return;
    b.arrived = 0;
    ++b.passed;
    ++progress;
}
void barrier(unsigned number, unsigned threads) {
    const NamedBarrier& b = named[number];
    const std::uint64_t now = b.passed;
    arrive(number, threads);
    while (b.passed == now) yield();
}
void product(std::function<void()> act) { current->open_products.push_back(std::move(act)); }
void products_commit() {
    current->products.push_back(std::move(current->open_products));
    current->open_products.clear();
}
void products_wait(int left) {
    auto& groups = current->products;
    const auto done = static_cast<std::ptrdiff_t>(groups.size()) - left;
    if (done <= 0) return;
    for (std::ptrdiff_t i = 0; i < done; ++i)
        for (const auto& act : groups[static_cast<std::size_t>(i)]) act();
    groups.erase(groups.begin(), groups.begin() + done);
}

}  // namespace emulator
