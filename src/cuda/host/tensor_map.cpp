#include "cuda/host/tensor_map.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace flashqla::cuda {
namespace {

// Of the driver's functions this is the only one, and the library is not linked to the driver.
auto encoder() noexcept {
    static const auto encode = [] {
        constexpr unsigned kSince = 12000;
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
        const cudaError_t error =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSince, cudaEnableDefault, &found);
        if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) function = nullptr;
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    }();
    return encode;
}

}  // namespace

bool make_tensor_map(TensorMap& map, const TokenRef& x, const Problem& p, std::int32_t heads,
                     std::int32_t columns) noexcept {
    const auto encode = encoder();
    if (!encode) return false;
    constexpr std::int64_t kAlign = 16, kElement = 2;
    const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(heads),
                                 static_cast<cuuint64_t>(p.tokens),
                                 static_cast<cuuint64_t>(p.sequences > 0 ? 1 : p.batch)};
    cuuint64_t strides[3];
    for (int i = 0; i < 3; ++i) {
        std::int64_t bytes = (i == 0 ? x.head : i == 1 ? x.token : x.batch) * kElement;
        if (sizes[i + 1] == 1) bytes = kAlign;  // never taken
        if (bytes <= 0 || bytes % kAlign != 0) return false;
        strides[i] = static_cast<cuuint64_t>(bytes);
    }
    constexpr cuuint32_t kBox[4] = {64, 1, 64, 1}, kSteps[4] = {1, 1, 1, 1};
    static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));
    return encode(reinterpret_cast<CUtensorMap*>(&map), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, x.data, sizes, strides,
                  kBox, kSteps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace flashqla::cuda
