// The calls of flashqla.hpp as tvm-ffi functions: DLPack in, one sentence out. Nothing is allocated but the workspace;
// outputs are the caller's tensors. tvm-ffi releases Python's interpreter lock around every call.
//
// A call returns 0, or, before anything is computed, bits for the arguments (by position) that must be made contiguous
// first: token tensors and vectors need unit stride in the last dimension, states contiguous inner matrices. The caller
// copies those and calls again. Asking torch for strides beforehand would cost microseconds in every call.
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <chrono>

#include "plans.hpp"
#include "scratch.hpp"

namespace flashqla::python {
namespace {

// The name of a backend; none for the best one.
using Backend = tvm::ffi::Optional<tvm::ffi::String>;

Settings settings_of(std::int64_t modes, double scale, const Backend& backend, std::int64_t threads,
                     std::int64_t context_split) {
    Settings settings;
    settings.modes = modes;
    settings.scale = scale;
    if (backend.has_value()) settings.backend = std::string(*backend);
    settings.threads = threads;
    settings.context_split = context_split;
    return settings;
}

// Reads the arguments of a call and collects the bits of those to copy. One object a call, asked for every argument in
// order.
class Copies {
public:
    explicit Copies(std::int64_t modes) noexcept : extra_(extra_of(modes)) {}

    // A tensor whose last stride must be 1.
    template <class T>
    void rows(TensorView& view, const char* name, const T& tensor) {
        read(view, name, tensor, 1);
    }
    // States, whose last two dimensions must be contiguous.
    template <class T>
    void states(TensorView& view, const char* name, const T& tensor) {
        read(view, name, tensor, 2);
    }
    // The caller's memory, or an index tensor of any stride: never copied.
    template <class T>
    void as_is(TensorView& view, const char* name, const T& tensor) {
        read(view, name, tensor, 0);
    }
    std::int64_t bits() const noexcept { return bits_; }

private:
    template <class T>
    void read(TensorView& view, const char* name, const T& tensor, int inner) {
        read_view(view, name, tensor, extra_);
        std::int64_t expected = 1;
        for (int axis = view.rank - 1; axis >= 0 && axis >= view.rank - inner; --axis) {
            if (view.shape[axis] > 1 && view.stride[axis] != expected) bits_ |= std::int64_t{1} << position_;
            expected *= std::max<std::int64_t>(view.shape[axis], 1);  // as read_view() does in an empty tensor
        }
        ++position_;
    }

    Extra extra_;
    std::int64_t bits_ = 0;
    int position_ = 0;
};

// The arguments that all passes share, under the same names in all three structs.
template <class Args>
void fill_inputs(Copies& copies, Args& args, const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                 const OptionalTensor& beta, const OptionalTensor& A_log, const OptionalTensor& dt_bias,
                 const OptionalTensor& cu_seqlens) {
    copies.rows(args.q, "q", q);                             // [B,T,Hk,K]
    copies.rows(args.k, "k", k);                             // [B,T,Hk,K]
    copies.rows(args.v, "v", v);                             // [B,T,Hv,V]
    copies.rows(args.g, "g", g);                             // [B,T,Hv]
    copies.rows(args.beta, "beta", beta);                    // [B,T,Hv]
    copies.rows(args.A_log, "A_log", A_log);                 // [Hv]
    copies.rows(args.dt_bias, "dt_bias", dt_bias);           // [Hv]
    copies.rows(args.cu_seqlens, "cu_seqlens", cu_seqlens);  // [N+1]
}

template <class Args>
Plan plan_of(const Args& args, DType out, const Settings& settings) {
    return cached_plan(problem_of(args.q, args.v, args.cu_seqlens, out, settings), args.q.device, options_of(settings));
}

std::int64_t forward_call(Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor beta, OptionalTensor A_log,
                          OptionalTensor dt_bias, OptionalTensor cu_seqlens, OptionalTensor initial_state,
                          OptionalTensor final_state, OptionalTensor state_indices, OptionalTensor state_indices_out,
                          OptionalTensor has_initial_state, OptionalTensor checkpoints, OptionalTensor checkpoint_list,
                          Tensor o, std::int64_t modes, double scale, std::int64_t checkpoint_every,
                          std::int64_t decode_rows, Backend backend, std::int64_t threads, std::int64_t context_split) {
    Copies copies(modes);
    ForwardArgs args;
    fill_inputs(copies, args, q, k, v, g, beta, A_log, dt_bias, cu_seqlens);
    copies.states(args.initial_state, "initial_state", initial_state);             // [N or slots,Hv,..]
    copies.as_is(args.final_state, "final_state", final_state);                    // [N or slots,Hv,..]
    copies.as_is(args.state_indices, "state_indices", state_indices);              // [N]
    copies.as_is(args.state_indices_out, "state_indices_out", state_indices_out);  // [N]
    copies.rows(args.has_initial_state, "has_initial_state", has_initial_state);   // [N]
    copies.as_is(args.checkpoints, "checkpoints", checkpoints);                    // [rows,Hv,..]
    copies.rows(args.checkpoint_list, "checkpoint_list", checkpoint_list);         // [rows,2]
    copies.as_is(args.o, "o", o);                                                  // [B,T,Hv,V]

    if (copies.bits() != 0) return copies.bits();
    Settings settings = settings_of(modes, scale, backend, threads, context_split);
    settings.checkpoint_every = checkpoint_every;
    settings.decode_rows = decode_rows;
    const Plan plan = plan_of(args, args.o.dtype, settings);
    const Scratch scratch(plan.device(), plan.workspace_bytes(Pass::forward));
    raise_if_bad(forward(plan, args, scratch.get(), current_stream(plan.device())));
    return 0;
}

std::int64_t backward_call(Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor beta, OptionalTensor A_log,
                           OptionalTensor dt_bias, OptionalTensor cu_seqlens, OptionalTensor initial_state,
                           OptionalTensor d_o, OptionalTensor d_final_state, OptionalTensor d_q, OptionalTensor d_k,
                           OptionalTensor d_v, OptionalTensor d_g, OptionalTensor d_beta, OptionalTensor d_A_log,
                           OptionalTensor d_dt_bias, OptionalTensor d_initial_state, std::int64_t modes, double scale,
                           Backend backend, std::int64_t threads, std::int64_t context_split) {
    Copies copies(modes);
    BackwardArgs args;
    fill_inputs(copies, args, q, k, v, g, beta, A_log, dt_bias, cu_seqlens);
    copies.states(args.initial_state, "initial_state", initial_state);       // [N,Hv,..]
    copies.rows(args.d_o, "d_o", d_o);                                       // [B,T,Hv,V]
    copies.states(args.d_final_state, "d_final_state", d_final_state);       // [N,Hv,..]
    copies.as_is(args.d_q, "d_q", d_q);                                      // [B,T,Hk,K]
    copies.as_is(args.d_k, "d_k", d_k);                                      // [B,T,Hk,K]
    copies.as_is(args.d_v, "d_v", d_v);                                      // [B,T,Hv,V]
    copies.as_is(args.d_g, "d_g", d_g);                                      // [B,T,Hv]
    copies.as_is(args.d_beta, "d_beta", d_beta);                             // [B,T,Hv]
    copies.as_is(args.d_A_log, "d_A_log", d_A_log);                          // [Hv]
    copies.as_is(args.d_dt_bias, "d_dt_bias", d_dt_bias);                    // [Hv]
    copies.as_is(args.d_initial_state, "d_initial_state", d_initial_state);  // [N,Hv,..]

    if (copies.bits() != 0) return copies.bits();
    const Settings settings = settings_of(modes | kForBackward, scale, backend, threads, context_split);
    const Plan plan = plan_of(args, DType::none, settings);
    const Scratch scratch(plan.device(), plan.workspace_bytes(Pass::backward));
    raise_if_bad(backward(plan, args, scratch.get(), current_stream(plan.device())));
    return 0;
}

void fill_decode(Copies& copies, DecodeArgs& args, const Tensor& q, const Tensor& k, const Tensor& v,
                 const OptionalTensor& g, const OptionalTensor& beta, const OptionalTensor& A_log,
                 const OptionalTensor& dt_bias, const OptionalTensor& cu_seqlens, const Tensor& state,
                 const OptionalTensor& state_indices, const OptionalTensor& state_indices_out,
                 const OptionalTensor& has_initial_state, const OptionalTensor& num_accepted,
                 const OptionalTensor& intermediate_states, const OptionalTensor& intermediate_indices,
                 const OptionalTensor& parent_tokens, const Tensor& o, bool commit_state) {
    fill_inputs(copies, args, q, k, v, g, beta, A_log, dt_bias, cu_seqlens);
    copies.as_is(args.state, "state", state);                                              // [slots,Hv,..]
    copies.as_is(args.state_indices, "state_indices", state_indices);                      // [N] or [N,S]
    copies.as_is(args.state_indices_out, "state_indices_out", state_indices_out);          // [N]
    copies.rows(args.has_initial_state, "has_initial_state", has_initial_state);           // [N]
    copies.rows(args.num_accepted, "num_accepted", num_accepted);                          // [N]
    copies.as_is(args.intermediate_states, "intermediate_states", intermediate_states);    // [M,>=T,Hv,..]
    copies.rows(args.intermediate_indices, "intermediate_indices", intermediate_indices);  // [N]
    copies.rows(args.parent_tokens, "parent_tokens", parent_tokens);                       // [N,>=T]
    copies.as_is(args.o, "o", o);                                                          // [B,T,Hv,V]
    args.commit_state = commit_state;
}

std::int64_t decode_call(Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor beta, OptionalTensor A_log,
                         OptionalTensor dt_bias, OptionalTensor cu_seqlens, Tensor state, OptionalTensor state_indices,
                         OptionalTensor state_indices_out, OptionalTensor has_initial_state,
                         OptionalTensor num_accepted, OptionalTensor intermediate_states,
                         OptionalTensor intermediate_indices, OptionalTensor parent_tokens, Tensor o, bool commit_state,
                         std::int64_t modes, double scale, Backend backend, std::int64_t threads) {
    Copies copies(modes);
    DecodeArgs args;
    fill_decode(copies, args, q, k, v, g, beta, A_log, dt_bias, cu_seqlens, state, state_indices, state_indices_out,
                has_initial_state, num_accepted, intermediate_states, intermediate_indices, parent_tokens, o,
                commit_state);
    if (copies.bits() != 0) return copies.bits();
    const Plan plan = plan_of(args, args.o.dtype, settings_of(modes, scale, backend, threads, 0));
    const Scratch scratch(plan.device(), plan.workspace_bytes(Pass::decode));
    raise_if_bad(decode(plan, args, scratch.get(), current_stream(plan.device())));
    return 0;
}

// For bench/python_overhead.py: seconds of one flashqla::decode, called `repeats` times by C++ with a plan at hand.
double decode_seconds(std::int64_t repeats, Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor beta,
                      OptionalTensor A_log, OptionalTensor dt_bias, Tensor state, OptionalTensor state_indices,
                      Tensor o, std::int64_t modes, std::int64_t threads) {
    const OptionalTensor no;
    Copies copies(modes);
    DecodeArgs args;
    fill_decode(copies, args, q, k, v, g, beta, A_log, dt_bias, no, state, state_indices, no, no, no, no, no, no, o,
                true);
    const Plan plan = plan_of(args, args.o.dtype, settings_of(modes, 0.0, {}, threads, 0));
    const Scratch scratch(plan.device(), plan.workspace_bytes(Pass::decode));
    const auto begin = std::chrono::steady_clock::now();
    for (std::int64_t i = 0; i < repeats; ++i) {
        raise_if_bad(decode(plan, args, scratch.get(), current_stream(plan.device())));
    }
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    return elapsed.count() / static_cast<double>(std::max<std::int64_t>(repeats, 1));
}

// The sizes that a plan needs and commit() has no tensors for come from the pool [slots,Hv,..] and the buffer
// [M,T,Hv,..] themselves.
void commit_call(Tensor state, OptionalTensor state_indices, Tensor intermediate_states,
                 OptionalTensor intermediate_indices, Tensor accepted, std::int64_t modes) {
    CommitArgs args;
    args.state = view_of("state", state, extra_of(modes));
    args.state_indices = view_of("state_indices", state_indices, extra_of(modes));
    args.intermediate_states = view_of("intermediate_states", intermediate_states, extra_of(modes));
    args.intermediate_indices = view_of("intermediate_indices", intermediate_indices, extra_of(modes));
    args.accepted = view_of("accepted", accepted, extra_of(modes));
    if (args.state.rank != 4) {
        raise("ValueError", "flash_qla: state has " + std::to_string(args.state.rank) +
                                " dimensions; its shape must be [slots,Hv,K,V] or [slots,Hv,V,K]");
    }
    if (args.intermediate_states.rank != 5) {
        raise("ValueError", "flash_qla: intermediate_states has " + std::to_string(args.intermediate_states.rank) +
                                " dimensions; its shape must be [M,T,Hv,K,V] or [M,T,Hv,V,K]");
    }
    if (args.accepted.rank != 1) {
        raise("ValueError",
              "flash_qla: accepted has " + std::to_string(args.accepted.rank) + " dimensions; its shape must be [N]");
    }
    const bool v_first = (modes & kStateVFirst) != 0;
    Problem p;
    p.batch = args.accepted.shape[0];
    p.tokens = std::min(args.intermediate_states.shape[1], kMaxDecodeTokens);
    p.heads_k = p.heads_v = static_cast<std::int32_t>(args.state.shape[1]);
    p.dim_k = static_cast<std::int32_t>(args.state.shape[v_first ? 3 : 2]);
    p.dim_v = static_cast<std::int32_t>(args.state.shape[v_first ? 2 : 3]);
    p.io = DType::f32;
    p.state_layout = v_first ? StateLayout::vk : StateLayout::kv;
    p.pad_rule = (modes & kPadNonPositive) ? PadRule::non_positive : PadRule::negative;
    const Plan plan = cached_plan(p, args.state.device, {});
    const Scratch scratch(plan.device(), plan.workspace_bytes(Pass::decode));
    raise_if_bad(commit(plan, args, scratch.get(), current_stream(plan.device())));
}

// Addresses of the two functions of TorchMemory. Called once, before any other function.
void use_torch_memory(std::int64_t allocate, std::int64_t release) {
    torch_memory.allocate = reinterpret_cast<decltype(torch_memory.allocate)>(static_cast<std::intptr_t>(allocate));
    torch_memory.release = reinterpret_cast<decltype(torch_memory.release)>(static_cast<std::intptr_t>(release));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(use_torch_memory, use_torch_memory)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(forward, forward_call)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(backward, backward_call)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, decode_call)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(commit, commit_call)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode_seconds, decode_seconds)

}  // namespace
}  // namespace flashqla::python
