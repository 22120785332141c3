#include <algorithm>
#include <cstddef>

#include "flashqla/flashqla.hpp"

namespace flashqla {

TensorView tensor(const void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device) noexcept {
    TensorView view;
    view.data = const_cast<void*>(data);
    view.dtype = dtype;
    view.rank = static_cast<std::int32_t>(shape.size());
    view.device = device;
    // A rank above kMaxRank is kept as it is: the checks of the run functions refuse it in a sentence.
    const std::size_t kept = std::min<std::size_t>(shape.size(), kMaxRank);
    std::copy_n(shape.begin(), kept, view.shape.begin());
    std::int64_t stride = 1;
    for (std::size_t i = kept; i-- > 0;) {
        view.stride[i] = stride;
        stride *= view.shape[i];
    }
    return view;
}

TensorView tensor(const void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                  std::initializer_list<std::int64_t> stride, Device device) noexcept {
    TensorView view = tensor(data, dtype, shape, device);
    std::copy_n(stride.begin(), std::min<std::size_t>(stride.size(), kMaxRank), view.stride.begin());
    return view;
}

std::size_t size_of(DType dtype) noexcept {
    switch (dtype) {
        case DType::f32:
        case DType::i32: return 4;
        case DType::f16:
        case DType::bf16: return 2;
        case DType::i64: return 8;
        case DType::u8: return 1;
        case DType::none: break;
    }
    return 0;
}

const char* name_of(DType dtype) noexcept {
    switch (dtype) {
        case DType::f32: return "f32";
        case DType::f16: return "f16";
        case DType::bf16: return "bf16";
        case DType::i32: return "i32";
        case DType::i64: return "i64";
        case DType::u8: return "u8";
        case DType::none: break;
    }
    return "none";
}

}  // namespace flashqla
