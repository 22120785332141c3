// The oracle in double, for flash_qla.testing: gradients can be checked by finite differences, which float32 is too
// coarse for. It is the same source file as the backend "reference", reached below the public API, because the API has
// no double: no model computes in it.
#include <tvm/ffi/tvm_ffi.h>

#include <cmath>
#include <initializer_list>
#include <memory>

#include "plans.hpp"
#include "reference/recurrence.hpp"
#include "reference/reference.hpp"
#include "scratch.hpp"

namespace flashqla::python {
namespace {

static_assert(kF64 == reference::kF64);

// The checks that src/api makes for the other functions, as far as memory safety needs them.
TensorView checked(const char* name, const TensorView& view, std::initializer_list<std::int64_t> shape) {
    bool good = view.rank == static_cast<int>(shape.size()) && view.device.type == DeviceType::cpu;
    std::string allowed;
    int i = 0;
    for (const std::int64_t size : shape) {
        good = good && view.shape[i++] == size;
        if (!allowed.empty()) allowed += ',';
        allowed += std::to_string(size);
    }
    if (good) return view;
    raise("ValueError",
          std::string("flash_qla.testing: the shape of ") + name + " must be [" + allowed + "], on the CPU");
}

TokenRef tokens(const char* name, const OptionalTensor& tensor, std::initializer_list<std::int64_t> shape) {
    if (!tensor.has_value()) return {};
    const TensorView x = checked(name, view_of(name, tensor, Extra::doubles), shape);
    const int last = x.rank - 1;
    if (x.stride[last] != 1 && x.shape[last] > 1) {
        raise("ValueError", std::string("flash_qla.testing: the last stride of ") + name + " must be 1");
    }
    return {x.data, x.dtype, x.stride[0], x.stride[1], x.stride[2]};
}

HeadRef heads(const char* name, const OptionalTensor& tensor, std::int64_t Hv) {
    if (!tensor.has_value()) return {};
    const TensorView x = checked(name, view_of(name, tensor, Extra::doubles), {Hv});
    return {x.data, x.dtype, x.stride[0]};
}

StateRef states(const char* name, const OptionalTensor& tensor, const Problem& p, std::int64_t N) {
    if (!tensor.has_value()) return {};
    const bool v_first = p.state_layout == StateLayout::vk;
    const std::int64_t K = p.dim_k, V = p.dim_v;
    const TensorView x =
        checked(name, view_of(name, tensor, Extra::doubles), {N, p.heads_v, v_first ? V : K, v_first ? K : V});
    return {x.data, x.dtype, N, x.stride[0], x.stride[1], x.stride[v_first ? 3 : 2], x.stride[v_first ? 2 : 3]};
}

IndexRef offsets(const OptionalTensor& tensor, const Problem& p) {
    if (!tensor.has_value()) return {};
    const TensorView x = checked("cu_seqlens", view_of("cu_seqlens", tensor), {p.sequences + 1});
    if (x.dtype != DType::i32 && x.dtype != DType::i64) {
        raise("ValueError", "flash_qla.testing: cu_seqlens must be int32 or int64");
    }
    const IndexRef ref{x.data, x.dtype, x.shape[0], 1, x.stride[0], 0};
    bool good = ref.at(0) == 0 && ref.at(p.sequences) <= p.tokens;
    for (std::int64_t n = 0; n < p.sequences; ++n) good = good && ref.at(n) <= ref.at(n + 1);
    if (!good)
        raise("ValueError", "flash_qla.testing: cu_seqlens must start at 0, never decrease and end at or before T");
    return ref;
}

// Fills what forward and backward share; returns the number of sequences.
std::int64_t fill(Inputs& in, const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                  const OptionalTensor& beta, const OptionalTensor& A_log, const OptionalTensor& dt_bias,
                  const OptionalTensor& cu_seqlens, std::int64_t modes, double scale) {
    Settings settings;
    settings.modes = modes;
    settings.scale = scale;
    Problem& p = in.problem;
    p = problem_of(view_of("q", q, Extra::doubles), view_of("v", v, Extra::doubles), view_of("cu_seqlens", cu_seqlens),
                   kF64, settings);
    if (p.heads_k < 1 || p.heads_v < 1 || p.heads_v % p.heads_k != 0 || p.dim_k < 1 || p.dim_v < 1) {
        raise("ValueError",
              "flash_qla.testing: the number of value heads must be a multiple of the number of key heads, "
              "and no head may be empty");
    }
    if (p.scale == 0.0f) p.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(p.dim_k)));
    const std::int64_t B = p.batch, T = p.tokens, Hk = p.heads_k, Hv = p.heads_v, K = p.dim_k, V = p.dim_v;
    in.count = p.sequences > 0 ? p.sequences : B;
    in.q = tokens("q", q, {B, T, Hk, K});
    in.k = tokens("k", k, {B, T, Hk, K});
    in.v = tokens("v", v, {B, T, Hv, V});
    in.g = tokens("g", g, {B, T, Hv});
    in.beta = tokens("beta", beta, {B, T, Hv});
    in.A_log = heads("A_log", A_log, Hv);
    in.dt_bias = heads("dt_bias", dt_bias, Hv);
    in.cu_seqlens = offsets(cu_seqlens, p);
    if ((p.gate != Gate::none) != g.has_value() || (p.gate == Gate::raw) != A_log.has_value()) {
        raise("ValueError", "flash_qla.testing: g and A_log must be given as the gate needs them");
    }
    return in.count;
}

template <class Call>
void run(const Call& call, Pass pass) {
    if (call.problem.tokens == 0 && call.count == 0) return;
    const std::unique_ptr<PassPlan> plan = kReferenceBackend.plan({call.problem, {}, {}, pass});
    const Scratch scratch({}, plan->workspace().bytes());
    raise_if_bad(plan->run(call, static_cast<std::byte*>(scratch.get().data), {}));
}

void oracle_forward(Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor beta, OptionalTensor A_log,
                    OptionalTensor dt_bias, OptionalTensor cu_seqlens, OptionalTensor initial_state,
                    OptionalTensor final_state, Tensor o, std::int64_t modes, double scale) {
    ForwardCall call;
    const std::int64_t N = fill(call, q, k, v, g, beta, A_log, dt_bias, cu_seqlens, modes, scale);
    const Problem& p = call.problem;
    call.initial_state = states("initial_state", initial_state, p, N);
    call.final_state = states("final_state", final_state, p, N);
    call.o = tokens("o", OptionalTensor(o), {p.batch, p.tokens, p.heads_v, p.dim_v});
    run(call, Pass::forward);
}

void oracle_backward(Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor beta, OptionalTensor A_log,
                     OptionalTensor dt_bias, OptionalTensor cu_seqlens, OptionalTensor initial_state,
                     OptionalTensor d_o, OptionalTensor d_final_state, OptionalTensor d_q, OptionalTensor d_k,
                     OptionalTensor d_v, OptionalTensor d_g, OptionalTensor d_beta, OptionalTensor d_A_log,
                     OptionalTensor d_dt_bias, OptionalTensor d_initial_state, std::int64_t modes, double scale) {
    BackwardCall call;
    const std::int64_t N = fill(call, q, k, v, g, beta, A_log, dt_bias, cu_seqlens, modes, scale);
    const Problem& p = call.problem;
    const std::int64_t B = p.batch, T = p.tokens, Hk = p.heads_k, Hv = p.heads_v, K = p.dim_k, V = p.dim_v;
    call.initial_state = states("initial_state", initial_state, p, N);
    call.d_o = tokens("d_o", d_o, {B, T, Hv, V});
    call.d_final_state = states("d_final_state", d_final_state, p, N);
    call.d_q = tokens("d_q", d_q, {B, T, Hk, K});
    call.d_k = tokens("d_k", d_k, {B, T, Hk, K});
    call.d_v = tokens("d_v", d_v, {B, T, Hv, V});
    call.d_g = tokens("d_g", d_g, {B, T, Hv});
    call.d_beta = tokens("d_beta", d_beta, {B, T, Hv});
    call.d_A_log = heads("d_A_log", d_A_log, Hv);
    call.d_dt_bias = heads("d_dt_bias", d_dt_bias, Hv);
    call.d_initial_state = states("d_initial_state", d_initial_state, p, N);
    run(call, Pass::backward);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(oracle_forward, oracle_forward)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(oracle_backward, oracle_backward)

}  // namespace
}  // namespace flashqla::python
