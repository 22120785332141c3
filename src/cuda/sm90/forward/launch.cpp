#include "cuda/sm90/forward/operands.hpp"

namespace flashqla::cuda::sm90 {

Status launch_forward(const char* function, const ChunkParams& params, int device, Stream stream) noexcept {
    const ForwardCall& call = params.call;
    const Problem& p = call.problem;
    ForwardParams all{params, static_cast<std::uint32_t>(pieces(p.dim_v, kCarryColumns)), {}, {}, {}, {}, false, false};
    all.mapped = make_tensor_map(all.q_map, call.q, p, p.heads_k, p.dim_k) &&
                 make_tensor_map(all.k_map, call.k, p, p.heads_k, p.dim_k) &&
                 make_tensor_map(all.v_map, call.v, p, p.heads_v, p.dim_v);
    // NOTE: the last chunk of a sequence leaves in vectors of 8.
    all.o_mapped =
        call.o.dtype == DType::bf16 && p.dim_v % 8 == 0 && make_tensor_map(all.o_map, call.o, p, p.heads_v, p.dim_v);
    return launch_forward_bf16({function, "forward", device, stream}, all);
}

}  // namespace flashqla::cuda::sm90
