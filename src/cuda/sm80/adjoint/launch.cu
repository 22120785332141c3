#include "cuda/sm80/adjoint/config.cuh"
#include "cuda/sm80/adjoint/operands.hpp"

namespace flashqla::cuda::sm80 {
namespace {

template <class Op>
std::size_t stage_bytes(std::int32_t dim_k) noexcept {
    switch (chunk_width(dim_k)) {
        case 64: return sizeof(AdjointStage<AdjointConfig<Op, 64>>);
        case 128: return sizeof(AdjointStage<AdjointConfig<Op, 128>>);
        default: return sizeof(AdjointStage<AdjointConfig<Op, 256>>);
    }
}

}  // namespace

std::size_t adjoint_shared_bytes(const Problem& problem, int stages) noexcept {
    return stages * (problem.io == DType::f32 ? stage_bytes<F32Operand>(problem.dim_k)
                                              : stage_bytes<Bf16Operand>(problem.dim_k));
}

Status launch_adjoints(const char* function, const AdjointParams& params, int device, Stream stream) noexcept {
    const LaunchSite site{function, "adjoint", device, stream};
    switch (params.call.problem.io) {
        case DType::f32: return launch_adjoints_f32(site, params);
        case DType::f16: return launch_adjoints_f16(site, params);
        default: return launch_adjoints_bf16(site, params);
    }
}

}  // namespace flashqla::cuda::sm80
