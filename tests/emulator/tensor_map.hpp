// What a TensorMap holds on the emulated GPU.
#pragma once

#include <cstdint>

namespace flashqla::cuda {

struct EmulatedMap {
    const char* data;
    std::int64_t head, token, batch;  // strides in elements
    std::int64_t columns, tokens;
};

}  // namespace flashqla::cuda
