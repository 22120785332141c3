// Starts the kernel of a call. Included by the files that compile kernels, one for each layout of states.
#pragma once

#include "cuda/sm80/decode/kernel.cuh"

namespace flashqla::cuda::sm80 {

template <bool kVFirst>
Status launch_decode_layout(const LaunchSite& site, const DecodeCall& call) noexcept {
    return with_decode_config<kVFirst>(call, Status{}, [&]<class Config>(Config) {
        const Problem& p = call.problem;
        const auto heads = static_cast<std::uint32_t>(p.heads_v);
        const auto strips = static_cast<std::uint32_t>(p.dim_v / Config::kWidth);
        const bool interleaved = p.grouping == Grouping::interleaved;
        DecodeGrid grid;
        grid.strips = Divider(strips);
        grid.heads = Divider(heads);
        grid.keys = Divider(static_cast<std::uint32_t>(interleaved ? call.group() : p.heads_k));
        grid.plain_rows = !call.state_indices && !call.state_indices_out && !call.has_initial_state &&
                          call.commit_state && call.state.rows >= call.count;
        const std::uint32_t blocks = static_cast<std::uint32_t>(call.count) * heads * strips;
        return launch(site, {blocks, Config::kThreads}, &decode_kernel<Config>, call, grid);
    });
}

}  // namespace flashqla::cuda::sm80
