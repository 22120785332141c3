// The launches that a chunk kernel offers for a walk: 64 columns of V in a block, one block a multiprocessor, which is
// done soonest when that is enough for all; and the shape that does most at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/chunk_setup.hpp"
#include "cuda/host/device.hpp"
#include "cuda/segment_cost.hpp"
#include "cuda/sm80/chunk/params.hpp"
#include "cuda/sm90/chunk/params.hpp"
#include "cuda/sm90/forward/params.hpp"

namespace flashqla::cuda {

// Microseconds that a block needs for a chunk, every multiprocessor having as many; and for its way in and out.
struct ChunkTimes {
    float narrow, two_narrow, wide;  // one block of 64 columns, two of them, one of 128; 0: not offered
    float start;
};

// What plans know of the chunk kernels of an architecture. Times are measured (docs/kernels/cuda_forward.md,
// hopper.md); only their ratios matter.
struct ChunkFamily {
    ChunkTimes outputs, ends, history;
    bool own_stages;  // the kernel knows how many chunks it holds, one block a multiprocessor
    // One launch does everything, by blocks that take one item after another: it prepares chunks itself, carries states
    // between segments, and begins segments before their cuts where the gates allow it. Else each walk has a launch,
    // and takes what the prepare kernel has made of chunks.
    bool together;
    Status (*launch)(const char* function, const ChunkParams& params, int device, Stream stream) noexcept;
};
inline constexpr ChunkFamily kSm80Chunks{.outputs = {2.75f, 4.7f, 4.0f, 1.0f},  // on one H200
                                         .ends = {1.95f, 3.4f, 3.1f, 3.0f},
                                         .history = {2.1f, 4.3f, 0.0f, 2.0f},
                                         .own_stages = false,
                                         .together = false,
                                         .launch = &sm80::launch_chunks};
inline constexpr ChunkFamily kSm90Chunks{.outputs = {1.75f, 0.0f, 2.8f, 1.5f},
                                         .ends = {1.3f, 0.0f, 2.2f, 3.0f},
                                         .history = {1.6f, 0.0f, 2.9f, 2.0f},
                                         .own_stages = true,
                                         .together = false,
                                         .launch = &sm90::launch_chunks};
// Forward alone.
inline constexpr ChunkFamily kSm90Forward{.outputs = {0.0f, 0.0f, 2.06f, 16.4f},
                                          .ends = {0.0f, 0.0f, 1.61f, 4.4f},
                                          .history = {},
                                          .own_stages = true,
                                          .together = true,
                                          .launch = &sm90::launch_forward};
inline constexpr float kCarryTime = 4.0f, kCarryStep = 2.3f;  // the launch of the ends is in the first
// The same where everything is together; and looking at cuts.
inline constexpr float kForwardCarryTime = 3.1f, kForwardCarryStep = 1.31f, kWindowsTime = 14.1f;

inline const ChunkFamily& chunk_family(const Problem& p, const GpuInfo& gpu) {
    return gpu.hopper && sm90::has_chunk_kernel(p) ? kSm90Chunks : kSm80Chunks;
}

inline const ChunkFamily& forward_family(const Problem& p, const GpuInfo& gpu) {
    return gpu.hopper && sm90::has_forward_kernel(p) ? kSm90Forward : chunk_family(p, gpu);
}

// Blocks of so many columns, so many on a multiprocessor. `transition`: columns besides those of V.
inline WalkLaunch walk_launch(const Problem& p, const GpuInfo& gpu, std::int32_t transition, int columns, int blocks,
                              float step, float start) {
    const auto transitions = static_cast<std::int32_t>(pieces(transition, columns));
    const auto all = static_cast<std::int32_t>(pieces(p.dim_v, columns)) + transitions;
    return {step, start, all, transitions, 1.0f / static_cast<float>(blocks * gpu.multiprocessors)};
}

struct ChunkWalkShapes {
    struct Shape {
        std::int32_t columns = 64, stages = 1;
    };
    Shape shapes[SegmentCosts::kLaunches];
    WalkLaunch launches[SegmentCosts::kLaunches];

    ChunkWalkShapes(const Problem& p, const GpuInfo& gpu, const ChunkFamily& family, const ChunkTimes& times,
                    std::int32_t transition) {
        const auto fits = [&](int columns, int stages, std::size_t blocks) {
            constexpr std::size_t kReserved = 1 << 10;  // of each block but the first, whose share the limit leaves out
            return family.own_stages ||
                   blocks * sm80::chunk_shared_bytes(p, columns, stages) + (blocks - 1) * kReserved <=
                       static_cast<std::size_t>(gpu.shared_bytes);
        };
        const auto launch = [&](int columns, int blocks, float step) {
            return walk_launch(p, gpu, transition, columns, blocks, step, times.start);
        };
        shapes[0] = {64, fits(64, 2, 1) ? 2 : 1};
        launches[0] = launch(64, 1, times.narrow);
        if (times.two_narrow > 0 && fits(64, 1, 2)) {
            shapes[1] = {64, fits(64, 2, 2) ? 2 : 1};
            launches[1] = launch(64, 2, times.two_narrow);
        }
        if (times.wide <= 0 || !sm80::has_wide_blocks(p) || !fits(128, 1, 1)) return;
        // NOTE: the workspace has room for columns of V in whole blocks of 64.
        if (family.own_stages && !family.together &&
            (padded_columns(p.dim_v) % 128 != 0 || padded_columns(transition) % 128 != 0)) {
            return;
        }
        const WalkLaunch other = launch(128, 1, times.wide);
        const auto for_many = [](const WalkLaunch& it) { return it.step * static_cast<float>(it.blocks) * it.share; };
        if (launches[1].step > 0 && for_many(launches[1]) <= for_many(other)) return;
        shapes[1] = {128, fits(128, 2, 1) ? 2 : 1};
        launches[1] = other;
    }

    // "128 columns of V), 2 chunk(s) in shared memory"
    std::string explain(const ChunkFamily& family, int launch) const {
        const std::string text = std::to_string(shapes[launch].columns) + " columns of V)";
        return family.own_stages ? text + " by Hopper's matrix units"
                                 : text + ", " + std::to_string(shapes[launch].stages) + " chunk(s) in shared memory";
    }
};

// A walk of the state by every launch that may be needed; blocks of those that are not leave at once. `rows`: segments
// and value heads. The first launch zeroes what params.zero_blocks says.
inline Status run_walk(const char* function, ChunkParams params, const ChunkFamily& family,
                       const ChunkWalkShapes& shapes, int walk, const SegmentPlan& segments, const ChunkSetup& setup,
                       std::uint32_t rows, std::byte* workspace, std::int32_t device, Stream stream) noexcept {
    for (int i = 0; i < SegmentCosts::kLaunches; ++i) {
        if (!segments.may(walk, i)) continue;
        params.table = setup.table(workspace, walk, i);
        params.columns = shapes.shapes[i].columns;
        params.stages = shapes.shapes[i].stages;
        params.tiles = shapes.launches[i].count();
        params.segment_blocks = rows * params.tiles;
        if (Status status = family.launch(function, params, device, stream); !status.ok()) return status;
        params.zero_blocks = 0;
    }
    return {};
}

}  // namespace flashqla::cuda
