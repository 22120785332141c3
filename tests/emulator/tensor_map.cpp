// In the place of src/cuda/host/tensor_map.cpp.
#include "cuda/host/tensor_map.hpp"

#include <cstring>

#include "tensor_map.hpp"

namespace flashqla::cuda {

bool make_tensor_map(TensorMap& map, const TokenRef& x, const Problem& p, std::int32_t heads,
                     std::int32_t columns) noexcept {
    const auto fits = [](std::int64_t count, std::int64_t stride) {
        return count == 1 || (stride > 0 && stride % 8 == 0);
    };
    const std::int64_t batch = p.sequences > 0 ? 1 : p.batch;
    if (reinterpret_cast<std::uintptr_t>(x.data) % 16 != 0 || !fits(heads, x.head) || !fits(p.tokens, x.token) ||
        !fits(batch, x.batch)) {
        return false;
    }
    const EmulatedMap of{static_cast<const char*>(x.data), x.head, x.token, x.batch, columns, p.tokens};
    static_assert(sizeof(of) <= sizeof(map));
    std::memcpy(&map, &of, sizeof(of));
    return true;
}

}  // namespace flashqla::cuda
