// 16 rows of S^T in a warp's registers, as the accumulators of a matrix product, and their way from and to memory.
#pragma once

#include <cstdint>

#include "base/call.hpp"
#include "cuda/device/blocked_tile.cuh"
#include "cuda/device/operand.cuh"

namespace flashqla::cuda {

template <int kK>
struct StateRows {
    float s[kK / 8][4];  // s[n]: rows row and row + 8 of the block's tile, columns 8 n + column and the next

    static __device__ __forceinline__ int row(int thread) { return thread / 32 * 16 + thread % 32 / 4; }
    static __device__ __forceinline__ int column(int thread) { return thread % 4 * 2; }

    __device__ __forceinline__ void zero() {
        each([](float& x, int, int) { x = 0.0f; });
    }
    // Rows v0.. of the identity.
    __device__ __forceinline__ void identity(int v0) {
        each([&](float& x, int r, int c) { x = v0 + r == c ? 1.0f : 0.0f; });
    }
    __device__ __forceinline__ void scale(float factor) {
#pragma unroll
        for (int n = 0; n < kK / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] *= factor;
    }

    // Of this lane's elements, without their signs.
    __device__ __forceinline__ float largest() const {
        float x = 0.0f;
#pragma unroll
        for (int n = 0; n < kK / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x = fmaxf(x, fabsf(s[n][e]));
        return x;
    }

    // Keys 16 k .. 16 k + 15 as an A operand.
    template <class Op>
    __device__ __forceinline__ Fragment<Op> operand(int k) const {
        return Fragment<Op>::of(s[2 * k], s[2 * k + 1]);
    }

    // Columns v0.. and keys k0.. of a caller's state (state_row, head); what lies outside the state becomes zero.
    __device__ __forceinline__ void load(const StateRef& from, const Problem& p, std::int64_t state_row,
                                         std::int32_t head, int v0, int k0 = 0) {
        *this = loaded(CallersState(from, p, state_row, head, v0, k0));
    }
    __device__ __forceinline__ void store(const StateRef& to, const Problem& p, std::int64_t state_row,
                                          std::int32_t head, int v0, int k0 = 0) const {
        store_to(CallersState(to, p, state_row, head, v0, k0), *this);
    }

    // The same without a call: for kernels in which a call would make wgmma wait, or everyone keep to its registers.
    __device__ __forceinline__ void load_here(const StateRef& from, const Problem& p, std::int64_t state_row,
                                              std::int32_t head, int v0) {
        const CallersState state(from, p, state_row, head, v0, 0);
        with_type(state.dtype, state.data, [&]<class T>(T* data) { load_typed(data, state); });
    }
    __device__ __forceinline__ void store_here(const StateRef& to, const Problem& p, std::int64_t state_row,
                                               std::int32_t head, int v0) {
        const CallersState state(to, p, state_row, head, v0, 0);
        with_type(state.dtype, state.data, [&]<class T>(T* data) { store_typed(data, state); });
    }

    // Rows v0.. and columns k0.. of a matrix [rows][columns] in fp32.
    __device__ __forceinline__ void load_rows(const float* from, int v0, int rows, int columns, int k0 = 0) {
        load_typed(from, CallersState(v0, rows, columns, k0));
    }
    __device__ __forceinline__ void store_rows(float* to, int v0, int rows, int columns, int k0 = 0) {
        store_typed(to, CallersState(v0, rows, columns, k0));
    }

    // This warp's rows v0.. of [parts][rows][kK] in the operands' type, in 8x8 blocks.
    template <class Op>
    __device__ __forceinline__ void store_operands(typename Op::Element* to, int v0, int rows) const {
        const BlockedRows<Op, kK> lines(to, v0 + static_cast<int>(threadIdx.x / 32) * 16, std::int64_t(rows) * kK);
#pragma unroll
        for (int n = 0; n < kK / 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                lines.set(half, n, Pair<Op>::of(s[n][2 * half], s[n][2 * half + 1]));
            }
    }

private:
    // NOTE: a state has at most 256 x 512 elements, so 32 bits hold every offset inside one.
    struct CallersState {
        void* data;
        DType dtype;
        std::int64_t first;
        int stride_v, stride_k, rows, keys;

        __device__ __forceinline__ CallersState(const StateRef& state, const Problem& p, std::int64_t state_row,
                                                std::int32_t head, int v0, int k0)
            : data(state.data),
              dtype(state.dtype),
              first(state.offset(state_row, head) + v0 * state.v + k0 * state.k),
              stride_v(static_cast<int>(state.v)),
              stride_k(static_cast<int>(state.k)),
              rows(p.dim_v - v0),
              keys(p.dim_k - k0) {}
        // Of a matrix [all_rows][columns].
        __device__ __forceinline__ CallersState(int v0, int all_rows, int columns, int k0)
            : data(nullptr),
              dtype(DType::f32),
              first(std::int64_t(v0) * columns + k0),
              stride_v(columns),
              stride_k(1),
              rows(all_rows - v0),
              keys(columns - k0) {}
    };

    template <class T>
    __device__ __forceinline__ void load_typed(const T* data, const CallersState& from) {
        if (is_whole(from)) {
            each_whole(data, from, [](float& x, const T& at) { x = to_float(at); });
            return;
        }
        each([&](float& x, int r, int c) {
            const bool inside = r < from.rows && c < from.keys;
            x = inside ? to_float(data[from.first + r * from.stride_v + c * from.stride_k]) : 0.0f;
        });
    }
    template <class T>
    __device__ __forceinline__ void store_typed(T* data, const CallersState& to) {
        if (is_whole(to)) {
            each_whole(data, to, [](float& x, T& at) { at = from_float<T>(x); });
            return;
        }
        each([&](float& x, int r, int c) {
            if (r < to.rows && c < to.keys) data[to.first + r * to.stride_v + c * to.stride_k] = from_float<T>(x);
        });
    }

    // Whether all rows and keys of a warp are inside, as they nearly always are.
    static __device__ __forceinline__ bool is_whole(const CallersState& state) {
        return static_cast<int>(threadIdx.x) / 32 * 16 + 16 <= state.rows && kK <= state.keys;
    }
    // f(element, where it is). NOTE: two instructions for each, instead of sixteen with comparisons. This runs once a
    // segment, and takes as long as its instructions take to come from memory.
    template <class T, class F>
    __device__ __forceinline__ void each_whole(T* data, const CallersState& state, F&& f) {
        const int thread = only_here(static_cast<int>(threadIdx.x));
        T* first = data + state.first + std::int64_t(row(thread)) * state.stride_v + column(thread) * state.stride_k;
        T* second = first + 8 * state.stride_v;
        if (sizeof(T) == 4 && state.stride_k == 1) {
#pragma unroll
            for (int n = 0; n < kK / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) f(s[n][e], (e < 2 ? first : second)[8 * n + e % 2]);
            return;
        }
#pragma unroll
        for (int n = 0; n < kK / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                f(s[n][e], (e < 2 ? first : second)[std::int64_t(state.stride_k) * (8 * n + e % 2)]);
            }
    }

    // NOTE: these two are not inlined: they run once a segment or checkpoint, and the offsets and conversions of all
    // types, twice each, would be ten times the code and half the registers of the walk around them.
    static __device__ __noinline__ StateRows loaded(CallersState from) {
        StateRows rows;
        with_type(from.dtype, from.data, [&]<class T>(T* data) { rows.load_typed(data, from); });
        return rows;
    }
    static __device__ __noinline__ void store_to(CallersState to, StateRows rows) {
        with_type(to.dtype, to.data, [&]<class T>(T* data) { rows.store_typed(data, to); });
    }

    // f(element, row within the block's tile, key)
    template <class F>
    __device__ __forceinline__ void each(F&& f) {
        // NOTE: or the rows and columns that a store compares with are kept in registers from the beginning on.
        const int thread = only_here(static_cast<int>(threadIdx.x));
        const int first = column(thread), row = StateRows::row(thread);
#pragma unroll
        for (int n = 0; n < kK / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) f(s[n][e], row + e / 2 * 8, 8 * n + first + e % 2);
    }
};

}  // namespace flashqla::cuda
