// One block copies kCommitElements elements of one (row, value head). A state is one piece of memory in either layout.
#pragma once

#include "cuda/device/grid_order.cuh"
#include "cuda/device/memory.cuh"
#include "cuda/sm80/commit/params.hpp"

namespace flashqla::cuda::sm80 {

__global__ void __launch_bounds__(kCommitThreads)
    commit_kernel(const __grid_constant__ CommitCall call, std::uint32_t parts) {
    wait_for_earlier_grids();
    const auto heads = static_cast<std::uint32_t>(call.heads_v);
    const std::uint32_t part = blockIdx.x % parts, row = blockIdx.x / parts;
    const std::int64_t n = row / heads, head = row % heads;
    const Move move = move_of(call, n);
    // The host has not seen the numbers; what lies outside stays as it is.
    if (move.slot < 0 || move.slot >= call.state.rows || move.m >= call.intermediate_states.rows) return;

    const int size = call.dim_k * call.dim_v, begin = static_cast<int>(part) * kCommitElements;
    const int end = min(size, begin + kCommitElements);
    const std::int64_t source =
        call.intermediate_states.offset(move.m, head) + move.step * call.intermediate_states.step;
    const std::int64_t target = call.state.offset(move.slot, head);
    with_type(call.state.dtype, call.state.data, [&]<class To>(To* to) {
        with_type(call.intermediate_states.dtype, call.intermediate_states.data, [&]<class From>(From* from) {
            to += target;
            from += source;
            if (size % 4 == 0 && fours_are_aligned(to) && fours_are_aligned(from)) {
                for (int i = begin + 4 * static_cast<int>(threadIdx.x); i < end; i += 4 * kCommitThreads) {
                    float x[4];
                    load_four(from + i, x);
                    store_four(to + i, x);
                }
                return;
            }
            for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kCommitThreads) {
                to[i] = from_float<To>(to_float(from[i]));
            }
        });
    });
}

}  // namespace flashqla::cuda::sm80
