// Barriers in shared memory between warps that load and warps that compute, and what else the two roles need; sm_90.
#pragma once

#include <cstdint>

#include "cuda/device/mma.cuh"
#include "cuda/host/tensor_map.hpp"

namespace flashqla::cuda {

// A phase ends when so many arrivals have come as it was made for; phases have parities 0, 1, 0, ...
struct alignas(8) Barrier {
    std::uint64_t x;

    __device__ __forceinline__ void init(std::uint32_t arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals) : "memory");
    }
    __device__ __forceinline__ void arrive() {
        asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
    }
    // Arrives, and makes the phase wait for so many bytes that copy_bulk() brings.
    __device__ __forceinline__ void arrive_expecting(std::uint32_t bytes) {
        asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
                     "r"(bytes)
                     : "memory");
    }
    // Arrives when all copies to shared memory that this thread has asked for are there. Who waits for it and
    // multiplies then needs fence_for_wgmma().
    __device__ __forceinline__ void arrive_after_copies() {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(this)) : "memory");
    }
    // Waits for the end of the phase with that parity. NOTE: a trap after millions of polls, so that an error in a
    // kernel ends in a message instead of a GPU that hangs; in one piece of assembly, which keeps registers of the
    // roles apart.
    __device__ __forceinline__ void wait(std::uint32_t parity) {
        asm volatile(
            "{\n.reg .pred done, late;\n.reg .u32 n;\nmov.u32 n, 0;\n"
            "POLL_%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra DONE_%=;\n"
            "add.u32 n, n, 1;\nsetp.gt.u32 late, n, 20000000;\n@late trap;\nbra POLL_%=;\nDONE_%=:\n}\n" ::"r"(
                shared_address(this)),
            "r"(parity)
            : "memory");
    }
};

// One lane of a whole warp, always the same. NOTE: unlike a comparison of its number this tells the compiler that it is
// one, and an instruction of the copy engine is not made a loop over lanes.
__device__ __forceinline__ bool is_elected() {
    std::uint32_t is;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(is));
    return is != 0;
}

// Makes barriers that one thread has initialised, visible to everyone.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// What this thread has written to shared memory becomes visible to the matrix units.
__device__ __forceinline__ void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// What has been seen in global memory can be seen by the background copies that this thread asks for.
__device__ __forceinline__ void fence_for_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Copies neighbouring bytes to shared memory in the background, by one thread: a multiple of 16, both addresses too.
// The matrix units see what came without a fence.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, std::uint32_t bytes, Barrier& barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(&barrier))
                 : "memory");
}

// Has a tensor map brought closer, which the first copy by it would wait for.
__device__ __forceinline__ void ask_for_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// A box of the tensor to a panel of a SwizzledTile, 8 KiB, in the background, by one thread.
__device__ __forceinline__ void copy_box(void* to, const TensorMap& map, Barrier& barrier, int column, int head,
                                         int token, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6}], "
        "[%2];" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(column), "r"(head), "r"(token), "r"(batch)
        : "memory");
}
inline constexpr std::uint32_t kBoxBytes = 64 * 64 * 2;

// The same the other way, from a panel that was written before a fence_for_wgmma() of each writer; what lies outside of
// the tensor stays. Until wait_until_boxes_are_read(), by the same thread, the panel stays as it is.
__device__ __forceinline__ void store_box(const TensorMap& map, const void* from, int column, int head, int token,
                                          int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n"
        "cp.async.bulk.commit_group;" ::"l"(&map),
        "r"(shared_address(from)), "r"(column), "r"(head), "r"(token), "r"(batch)
        : "memory");
}
// Waits for the boxes that this thread has stored to have been read.
__device__ __forceinline__ void wait_until_boxes_are_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits for kThreads threads, whole warps, that have this number in common; number 0 is __syncthreads().
template <int kNumber, int kThreads>
__device__ __forceinline__ void sync_threads() {
    asm volatile("bar.sync %0, %1;" ::"n"(kNumber), "n"(kThreads) : "memory");
}

__device__ __forceinline__ void sync_128(int number) { asm volatile("bar.sync %0, 128;" ::"r"(number) : "memory"); }
// Counts as one who is there, without waiting.
__device__ __forceinline__ void arrive_128(int number) { asm volatile("bar.arrive %0, 128;" ::"r"(number) : "memory"); }
// Waits for 128 threads with this number in common, and says whether any of them has it so.
__device__ __forceinline__ bool any_of_128(int number, bool is) {
    std::uint32_t any;
    asm volatile(
        "{\n.reg .pred one, all;\nsetp.ne.u32 one, %2, 0;\nbar.red.or.pred all, %1, 128, one;\nselp.u32 %0, 1, 0, "
        "all;\n}\n"
        : "=r"(any)
        : "r"(number), "r"(is ? 1 : 0)
        : "memory");
    return any != 0;
}

// Registers of this warpgroup's threads from here on.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flashqla::cuda
