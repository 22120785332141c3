// What a TensorMap holds on the emulated GPU.
#pragma once

#include <cstdint>

namespace flashqla::cuda {

struct EmulatedMap {
    const char* data;
    std::int64_t head, token, batch;  // strides in elements
    std::int64_t columns, tokens;

    bool has(int column_index, int token_index) const { return column_index < columns && token_index < tokens; }
    // An element of 16 bits.
    const char* at(int column_index, int head_index, int token_index, int batch_index) const {
        return data + 2 * (column_index + head_index * head + token_index * token + batch_index * batch);
    }
};

// Where a panel in shared memory has the element of a box, in bytes.
inline int place_in_panel(int row, int column) { return row * 128 + ((column / 8) ^ (row % 8)) * 16 + column % 8 * 2; }

}  // namespace flashqla::cuda
