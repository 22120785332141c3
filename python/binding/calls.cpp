// The calls of flashqla.hpp as tvm-ffi functions: DLPack in, one sentence out. Nothing is allocated but the workspace;
// outputs are the caller's tensors. tvm-ffi releases Python's interpreter lock around every call.
//
// NOTE: the order of the arguments is written once more in python/flash_qla/_native.py.
#include <tvm/ffi/tvm_ffi.h>

#include "plans.hpp"
#include "scratch.hpp"

namespace flashqla::python {
namespace {

using String = tvm::ffi::String;

Settings settings_of(std::int64_t modes, double scale, const String& backend, std::int64_t threads,
                     std::int64_t context_split) {
    Settings settings;
    settings.modes = modes;
    settings.scale = scale;
    settings.backend = std::string(backend.data(), backend.size());
    settings.threads = threads;
    settings.context_split = context_split;
    return settings;
}

// The arguments that all passes share, under the same names in all three structs.
template <class Args>
void fill_inputs(Args& args, const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                 const OptionalTensor& beta, const OptionalTensor& A_log, const OptionalTensor& dt_bias,
                 const OptionalTensor& cu_seqlens) {
    args.q = view_of("q", q);                             // [B,T,Hk,K]
    args.k = view_of("k", k);                             // [B,T,Hk,K]
    args.v = view_of("v", v);                             // [B,T,Hv,V]
    args.g = view_of("g", g);                             // [B,T,Hv]
    args.beta = view_of("beta", beta);                    // [B,T,Hv]
    args.A_log = view_of("A_log", A_log);                 // [Hv]
    args.dt_bias = view_of("dt_bias", dt_bias);           // [Hv]
    args.cu_seqlens = view_of("cu_seqlens", cu_seqlens);  // [N+1]
}

template <class Args>
Plan plan_of(const Args& args, DType out, const Settings& settings) {
    return cached_plan(problem_of(args.q, args.v, args.cu_seqlens, out, settings), args.q.device, options_of(settings));
}

void forward_call(Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor beta, OptionalTensor A_log,
                  OptionalTensor dt_bias, OptionalTensor cu_seqlens, OptionalTensor initial_state,
                  OptionalTensor final_state, OptionalTensor state_indices, OptionalTensor state_indices_out,
                  OptionalTensor has_initial_state, OptionalTensor checkpoints, OptionalTensor checkpoint_list, Tensor o,
                  std::int64_t modes, double scale, std::int64_t checkpoint_every, std::int64_t decode_rows,
                  String backend, std::int64_t threads, std::int64_t context_split) {
    ForwardArgs args;
    fill_inputs(args, q, k, v, g, beta, A_log, dt_bias, cu_seqlens);
    args.initial_state = view_of("initial_state", initial_state);              // [N or slots,Hv,..]
    args.final_state = view_of("final_state", final_state);                    // [N or slots,Hv,..]
    args.state_indices = view_of("state_indices", state_indices);              // [N]
    args.state_indices_out = view_of("state_indices_out", state_indices_out);  // [N]
    args.has_initial_state = view_of("has_initial_state", has_initial_state);  // [N]
    args.checkpoints = view_of("checkpoints", checkpoints);                    // [rows,Hv,..]
    args.checkpoint_list = view_of("checkpoint_list", checkpoint_list);        // [rows,2]
    args.o = view_of("o", o);                                                  // [B,T,Hv,V]

    Settings settings = settings_of(modes, scale, backend, threads, context_split);
    settings.checkpoint_every = checkpoint_every;
    settings.decode_rows = decode_rows;
    const Plan plan = plan_of(args, args.o.dtype, settings);
    const Scratch scratch(plan.device(), plan.workspace_bytes(Pass::forward));
    raise_if_bad(forward(plan, args, scratch.get(), current_stream(plan.device())));
}

void backward_call(Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor beta, OptionalTensor A_log,
                   OptionalTensor dt_bias, OptionalTensor cu_seqlens, OptionalTensor initial_state, OptionalTensor d_o,
                   OptionalTensor d_final_state, OptionalTensor d_q, OptionalTensor d_k, OptionalTensor d_v,
                   OptionalTensor d_g, OptionalTensor d_beta, OptionalTensor d_A_log, OptionalTensor d_dt_bias,
                   OptionalTensor d_initial_state, std::int64_t modes, double scale, String backend,
                   std::int64_t threads, std::int64_t context_split) {
    BackwardArgs args;
    fill_inputs(args, q, k, v, g, beta, A_log, dt_bias, cu_seqlens);
    args.initial_state = view_of("initial_state", initial_state);        // [N,Hv,..]
    args.d_o = view_of("d_o", d_o);                                      // [B,T,Hv,V]
    args.d_final_state = view_of("d_final_state", d_final_state);        // [N,Hv,..]
    args.d_q = view_of("d_q", d_q);                                      // [B,T,Hk,K]
    args.d_k = view_of("d_k", d_k);                                      // [B,T,Hk,K]
    args.d_v = view_of("d_v", d_v);                                      // [B,T,Hv,V]
    args.d_g = view_of("d_g", d_g);                                      // [B,T,Hv]
    args.d_beta = view_of("d_beta", d_beta);                             // [B,T,Hv]
    args.d_A_log = view_of("d_A_log", d_A_log);                          // [Hv]
    args.d_dt_bias = view_of("d_dt_bias", d_dt_bias);                    // [Hv]
    args.d_initial_state = view_of("d_initial_state", d_initial_state);  // [N,Hv,..]

    const Settings settings = settings_of(modes | kForBackward, scale, backend, threads, context_split);
    const Plan plan = plan_of(args, DType::none, settings);
    const Scratch scratch(plan.device(), plan.workspace_bytes(Pass::backward));
    raise_if_bad(backward(plan, args, scratch.get(), current_stream(plan.device())));
}

void decode_call(Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor beta, OptionalTensor A_log,
                 OptionalTensor dt_bias, OptionalTensor cu_seqlens, Tensor state, OptionalTensor state_indices,
                 OptionalTensor state_indices_out, OptionalTensor has_initial_state, OptionalTensor num_accepted,
                 OptionalTensor intermediate_states, OptionalTensor intermediate_indices, OptionalTensor parent_tokens,
                 Tensor o, bool commit_state, std::int64_t modes, double scale, String backend, std::int64_t threads) {
    DecodeArgs args;
    fill_inputs(args, q, k, v, g, beta, A_log, dt_bias, cu_seqlens);
    args.state = view_of("state", state);                                               // [slots,Hv,..]
    args.state_indices = view_of("state_indices", state_indices);                       // [N] or [N,S]
    args.state_indices_out = view_of("state_indices_out", state_indices_out);           // [N]
    args.has_initial_state = view_of("has_initial_state", has_initial_state);           // [N]
    args.num_accepted = view_of("num_accepted", num_accepted);                          // [N]
    args.intermediate_states = view_of("intermediate_states", intermediate_states);     // [M,>=T,Hv,..]
    args.intermediate_indices = view_of("intermediate_indices", intermediate_indices);  // [N]
    args.parent_tokens = view_of("parent_tokens", parent_tokens);                       // [N,>=T]
    args.o = view_of("o", o);                                                           // [B,T,Hv,V]
    args.commit_state = commit_state;

    const Settings settings = settings_of(modes, scale, backend, threads, 0);
    const Plan plan = plan_of(args, args.o.dtype, settings);
    const Scratch scratch(plan.device(), plan.workspace_bytes(Pass::decode));
    raise_if_bad(decode(plan, args, scratch.get(), current_stream(plan.device())));
}

// The sizes that a plan needs and commit() has no tensors for come from the pool [slots,Hv,..] and the buffer
// [M,T,Hv,..] themselves.
void commit_call(Tensor state, OptionalTensor state_indices, Tensor intermediate_states,
                 OptionalTensor intermediate_indices, Tensor accepted, std::int64_t modes) {
    CommitArgs args;
    args.state = view_of("state", state);
    args.state_indices = view_of("state_indices", state_indices);
    args.intermediate_states = view_of("intermediate_states", intermediate_states);
    args.intermediate_indices = view_of("intermediate_indices", intermediate_indices);
    args.accepted = view_of("accepted", accepted);
    if (args.state.rank != 4) {
        raise("ValueError", "flash_qla: state has " + std::to_string(args.state.rank) +
                                " dimensions; its shape must be [slots,Hv,K,V] or [slots,Hv,V,K]");
    }
    if (args.intermediate_states.rank != 5) {
        raise("ValueError", "flash_qla: intermediate_states has " + std::to_string(args.intermediate_states.rank) +
                                " dimensions; its shape must be [M,T,Hv,K,V] or [M,T,Hv,V,K]");
    }
    if (args.accepted.rank != 1) {
        raise("ValueError", "flash_qla: accepted has " + std::to_string(args.accepted.rank) +
                                " dimensions; its shape must be [N]");
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

TVM_FFI_DLL_EXPORT_TYPED_FUNC(forward, forward_call)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(backward, backward_call)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, decode_call)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(commit, commit_call)

}  // namespace
}  // namespace flashqla::python
