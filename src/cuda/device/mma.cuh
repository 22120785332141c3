// The matrix instructions of sm_80, one wrapper each. Fragments are the registers of one lane; which element lies where
// is in the PTX manual under mma.m16n8k16. What this code relies on:
//
//   accumulator 16x8   c[0..1] row lane/4, c[2..3] row lane/4 + 8, columns 2 (lane % 4) and the next
//   A 16x16            a[0..3] = 8x8 blocks (0,0) (8,0) (0,8) (8,8), a pair of neighbouring columns in each
//   B 16x8             b[0..1] = 8x8 blocks (0,0) (8,0), a pair of neighbouring rows in each
//
// so two neighbouring accumulators, rounded, are an A fragment without any exchange between lanes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flashqla::cuda {

// c += A B in fp32.
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                            std::uint32_t b1, __nv_bfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                            std::uint32_t b1, __half) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of numbers in tf32: fp32 without what kTf32Mask leaves out.
//
//   A 16x8             a[0..3] = rows lane/4 and that + 8 of column lane % 4, then of column lane % 4 + 4
//   B 8x8              b[0..1] = rows lane % 4 and that + 4 of column lane/4
inline constexpr std::uint32_t kTf32Mask = 0xffffe000u;
__device__ __forceinline__ void mma_16x8x8(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                           std::uint32_t b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// NOTE: these two clobber no memory, so that other loads may move past them; as volatile statements they stay where
// they are among barriers. What they read must have been written before a barrier.
//
// Four 8x8 blocks of 16-bit elements; lanes 8i..8i+7 give the addresses of the rows of block i, 16 bytes each.
__device__ __forceinline__ void ldmatrix(std::uint32_t (&x)[4], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address));
}
__device__ __forceinline__ void ldmatrix_transposed(std::uint32_t (&x)[4], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address));
}

// The transpose of an 8x8 block that the warp holds a pair of columns a lane.
__device__ __forceinline__ std::uint32_t transpose_8x8(std::uint32_t x) {
    std::uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// Copies 16 bytes to shared memory in the background; `inside` false writes zeros and reads nothing.
__device__ __forceinline__ void copy_16_async(std::uint32_t to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kLeft of the newest groups are still on their way.
template <int kLeft>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

}  // namespace flashqla::cuda
