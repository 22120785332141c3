// The asynchronous matrix product of a warpgroup, sm_90a: D[64][N] += A[64][16] B[16][N], A in registers or shared
// memory, B in shared memory, D in registers. Which element lies where is in the PTX manual under wgmma; a warp w has
// rows 16 w .. 16 w + 15, laid out as with mma.m16n8k16 (src/cuda/device/mma.cuh), so accumulators of one product,
// rounded, are the next one's A.
//
// NOTE: between wgmma_fence() and wgmma_wait() nobody may touch the registers that a product reads or writes; the
// compiler sees to it only as long as no call and no branch lies in between.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/device/mma.cuh"
#include "cuda/device/shared_operand.cuh"

namespace flashqla::cuda {

// Before the first product, and whenever other instructions have written registers that a product uses.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kLeft of the newest groups are still at work.
template <int kLeft>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// Registers of a product, as something that is made here: after wgmma_wait(), or the compiler, which knows nothing of
// the wait, may move what uses them to before it; before wgmma_fence(), or what makes them to behind it.
template <int kTiles>
__device__ __forceinline__ void settle(float (&d)[kTiles][4]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
        asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}
__device__ __forceinline__ void settle(std::uint32_t (&a)[4]) {
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

// A number that is the same in all lanes, as something that the compiler knows to be so: operands that are made of it
// then cost an addition of the uniform unit instead of seven instructions.
__device__ __forceinline__ std::uint32_t uniform(std::uint32_t x) { return __shfl_sync(0xffffffffu, x, 0); }

// NOTE: a product is one statement of assembly with all of its registers, and its operands have numbers: those after
// the accumulators are given with each number of columns.
#define FQLA_FOUR(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FQLA_16(d, i) FQLA_FOUR(d, i), FQLA_FOUR(d, i + 1), FQLA_FOUR(d, i + 2), FQLA_FOUR(d, i + 3)
#define FQLA_32(d) FQLA_16(d, 0), FQLA_16(d, 4)
#define FQLA_64(d) FQLA_32(d), FQLA_16(d, 8), FQLA_16(d, 12)
#define FQLA_NUMBERS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FQLA_NUMBERS_32 \
    FQLA_NUMBERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FQLA_NUMBERS_64                                                                            \
    FQLA_NUMBERS_32                                                                                \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// D += A B with A in registers, D = A B where kAdd is false. `add` and `rows` are the numbers of operands.
#define FQLA_WGMMA_A_IN_REGISTERS(kTiles, Element, shape, outputs, numbers, a_and_b, add, rows)                   \
    template <bool kAdd, Rows kRows>                                                                              \
    __device__ __forceinline__ void wgmma(float(&d)[kTiles][4], const std::uint32_t(&a)[4], SharedOperand b,      \
                                          Element) {                                                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add                                                      \
                     ", 0;\n"                                                                                     \
                     "wgmma.mma_async.sync.aligned." shape " {" numbers "}, " a_and_b ", p, 1, 1, " rows ";\n}\n" \
                     : outputs                                                                                    \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "n"(kAdd ? 1 : 0),              \
                       "n"(static_cast<int>(kRows)));                                                             \
    }
FQLA_WGMMA_A_IN_REGISTERS(4, __half, "m64n32k16.f32.f16.f16", FQLA_16(d, 0), FQLA_NUMBERS_16,
                          "{%16, %17, %18, %19}, %20", "%21", "%22")
FQLA_WGMMA_A_IN_REGISTERS(8, __nv_bfloat16, "m64n64k16.f32.bf16.bf16", FQLA_32(d), FQLA_NUMBERS_32,
                          "{%32, %33, %34, %35}, %36", "%37", "%38")
FQLA_WGMMA_A_IN_REGISTERS(8, __half, "m64n64k16.f32.f16.f16", FQLA_32(d), FQLA_NUMBERS_32, "{%32, %33, %34, %35}, %36",
                          "%37", "%38")
FQLA_WGMMA_A_IN_REGISTERS(16, __nv_bfloat16, "m64n128k16.f32.bf16.bf16", FQLA_64(d), FQLA_NUMBERS_64,
                          "{%64, %65, %66, %67}, %68", "%69", "%70")
FQLA_WGMMA_A_IN_REGISTERS(16, __half, "m64n128k16.f32.f16.f16", FQLA_64(d), FQLA_NUMBERS_64,
                          "{%64, %65, %66, %67}, %68", "%69", "%70")

// The same with A in shared memory, and `add` known at run time: for sums that begin somewhere in a loop.
#define FQLA_WGMMA_A_IN_SHARED_MEMORY(kTiles, Element, shape, outputs, numbers, a_and_b, plus, rows)                   \
    template <Rows kRowsA, Rows kRows>                                                                                 \
    __device__ __forceinline__ void wgmma(float(&d)[kTiles][4], SharedOperand a, SharedOperand b, bool add, Element) { \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " plus                                                          \
                     ", 0;\n"                                                                                          \
                     "wgmma.mma_async.sync.aligned." shape " {" numbers "}, " a_and_b ", p, 1, 1, " rows ";\n}\n"      \
                     : outputs                                                                                         \
                     : "l"(a.bits()), "l"(b.bits()), "r"(add ? 1 : 0), "n"(static_cast<int>(kRowsA)),                  \
                       "n"(static_cast<int>(kRows)));                                                                  \
    }
FQLA_WGMMA_A_IN_SHARED_MEMORY(4, __nv_bfloat16, "m64n32k16.f32.bf16.bf16", FQLA_16(d, 0), FQLA_NUMBERS_16, "%16, %17",
                              "%18", "%19, %20")
FQLA_WGMMA_A_IN_SHARED_MEMORY(4, __half, "m64n32k16.f32.f16.f16", FQLA_16(d, 0), FQLA_NUMBERS_16, "%16, %17", "%18",
                              "%19, %20")
FQLA_WGMMA_A_IN_SHARED_MEMORY(8, __nv_bfloat16, "m64n64k16.f32.bf16.bf16", FQLA_32(d), FQLA_NUMBERS_32, "%32, %33",
                              "%34", "%35, %36")
FQLA_WGMMA_A_IN_SHARED_MEMORY(8, __half, "m64n64k16.f32.f16.f16", FQLA_32(d), FQLA_NUMBERS_32, "%32, %33", "%34",
                              "%35, %36")

// The same with `add` known beforehand.
template <bool kAdd, Rows kRowsA, Rows kRows>
__device__ __forceinline__ void wgmma(float (&d)[8][4], SharedOperand a, SharedOperand b, __nv_bfloat16) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" FQLA_NUMBERS_32 "}, %32, %33, p, 1, 1, %35, %36;\n}\n"
        : FQLA_32(d)
        : "l"(a.bits()), "l"(b.bits()), "n"(kAdd ? 1 : 0), "n"(static_cast<int>(kRowsA)), "n"(static_cast<int>(kRows)));
}

#undef FQLA_FOUR
#undef FQLA_16
#undef FQLA_32
#undef FQLA_64
#undef FQLA_NUMBERS_16
#undef FQLA_NUMBERS_32
#undef FQLA_NUMBERS_64
#undef FQLA_WGMMA_A_IN_REGISTERS
#undef FQLA_WGMMA_A_IN_SHARED_MEMORY

// Four 8x8 blocks to shared memory; lanes 8i..8i+7 give the addresses of the rows of block i.
__device__ __forceinline__ void stmatrix(std::uint32_t address, std::uint32_t x0, std::uint32_t x1, std::uint32_t x2,
                                         std::uint32_t x3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x0), "r"(x1),
                 "r"(x2), "r"(x3)
                 : "memory");
}
// The transpose of four 8x8 blocks to shared memory; lanes 8i..8i+7 give the addresses of the rows of block i.
__device__ __forceinline__ void stmatrix_transposed(std::uint32_t address, std::uint32_t x0, std::uint32_t x1,
                                                    std::uint32_t x2, std::uint32_t x3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x0), "r"(x1),
                 "r"(x2), "r"(x3)
                 : "memory");
}

}  // namespace flashqla::cuda
