#include "cuda/sm80/gradient/config.cuh"
#include "cuda/sm80/gradient/finish.cuh"
#include "cuda/sm80/gradient/gates.cuh"
#include "cuda/sm80/gradient/operands.hpp"

namespace flashqla::cuda::sm80 {

std::size_t gradient_shared_bytes(const Problem& problem, int columns, int stages) noexcept {
    const int width = chunk_width(problem.dim_k);
    if (problem.io == DType::f32) {
        if (columns == 32 && width == 64) return gradient_bytes<GradientConfig<F32Operand, 64, 32>>(stages);
        if (columns == 32 && width == 128) return gradient_bytes<GradientConfig<F32Operand, 128, 32>>(stages);
        if (columns == 16 && width == 256) return gradient_bytes<GradientConfig<F32Operand, 256, 16>>(stages);
    } else {
        if (columns == 64 && width == 64) return gradient_bytes<GradientConfig<Bf16Operand, 64, 64>>(stages);
        if (columns == 64 && width == 128) return gradient_bytes<GradientConfig<Bf16Operand, 128, 64>>(stages);
        if (columns == 32 && width == 128) return gradient_bytes<GradientConfig<Bf16Operand, 128, 32>>(stages);
        if (columns == 32 && width == 256) return gradient_bytes<GradientConfig<Bf16Operand, 256, 32>>(stages);
    }
    return ~std::size_t(0);  // no kernel has that tile
}

int gradient_columns(const Problem& problem, int shared_bytes) noexcept {
    for (const int columns : {64, 32, 16}) {
        if (gradient_shared_bytes(problem, columns, 1) <= static_cast<std::size_t>(shared_bytes)) return columns;
    }
    return 0;
}

Status launch_gradients(const char* function, const GradientParams& params, std::int64_t chunks, int device,
                        Stream stream) noexcept {
    const LaunchSite site{function, "gradient", device, stream};
    const auto blocks = static_cast<std::uint32_t>(chunks * params.call.problem.heads_k);
    switch (params.call.problem.io) {
        case DType::f32: return launch_gradients_f32(site, params, blocks);
        case DType::f16: return launch_gradients_f16(site, params, blocks);
        default: return launch_gradients_bf16(site, params, blocks);
    }
}

Status launch_gates(const char* function, const GatesParams& params, int device, Stream stream) noexcept {
    constexpr std::int64_t kWarps = kGatesThreads / 32;
    const LaunchShape shape{static_cast<std::uint32_t>((params.warps + kWarps - 1) / kWarps), kGatesThreads};
    const LaunchSite site{function, "gates", device, stream};
    return params.table.chunk == 32 ? launch(site, shape, &gates_kernel<32>, params)
                                    : launch(site, shape, &gates_kernel<64>, params);
}

Status launch_finish(const char* function, const FinishParams& params, int device, Stream stream) noexcept {
    return launch({function, "finish", device, stream}, {params.head_blocks + params.zero_blocks, kFinishThreads},
                  &finish_kernel, params);
}

}  // namespace flashqla::cuda::sm80
