#include "cuda/sm80/chunk/config.cuh"
#include "cuda/sm80/chunk/operands.hpp"

namespace flashqla::cuda::sm80 {
namespace {

template <class Op, int kK>
std::size_t stage_bytes(int columns) noexcept {
    return columns == 128 ? sizeof(ChunkStage<ChunkConfig<Op, kK, 128>>) : sizeof(ChunkStage<ChunkConfig<Op, kK, 64>>);
}

template <class Op>
std::size_t stage_bytes(std::int32_t dim_k, int columns) noexcept {
    switch (chunk_width(dim_k)) {
        case 64: return stage_bytes<Op, 64>(columns);
        case 128: return stage_bytes<Op, 128>(columns);
        default: return stage_bytes<Op, 256>(columns);
    }
}

}  // namespace

std::size_t chunk_shared_bytes(const Problem& problem, int columns, int stages) noexcept {
    return stages * (problem.io == DType::f32 ? stage_bytes<F32Operand>(problem.dim_k, columns)
                                              : stage_bytes<Bf16Operand>(problem.dim_k, columns));
}

Status launch_chunks(const char* function, const ChunkParams& params, int device, Stream stream) noexcept {
    const LaunchSite site{function, "chunk", device, stream};
    switch (params.call.problem.io) {
        case DType::f32: return launch_chunks_f32(site, params);
        case DType::f16: return launch_chunks_f16(site, params);
        default: return launch_chunks_bf16(site, params);
    }
}

}  // namespace flashqla::cuda::sm80
