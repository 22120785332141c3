#include "cuda/sm80/adjoint/config.cuh"
#include "cuda/sm80/adjoint/operands.hpp"

namespace flashqla::cuda::sm80 {
namespace {

template <class Op>
std::size_t shared_bytes(std::int32_t dim_k, int split, int stages) noexcept {
    switch (chunk_width(dim_k)) {
        case 64: return AdjointShared<AdjointConfig<Op, 64, 1>>::bytes(stages);
        case 128:
            return split == 2 ? AdjointShared<AdjointConfig<Op, 128, 2>>::bytes(stages)
                              : AdjointShared<AdjointConfig<Op, 128, 1>>::bytes(stages);
        default: return AdjointShared<AdjointConfig<Op, 256, 1>>::bytes(stages);
    }
}

}  // namespace

std::size_t adjoint_shared_bytes(const Problem& problem, int split, int stages) noexcept {
    return problem.io == DType::f32 ? shared_bytes<F32Operand>(problem.dim_k, split, stages)
                                    : shared_bytes<Bf16Operand>(problem.dim_k, split, stages);
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
