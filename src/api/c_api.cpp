// The C interface: structs copied by size, then the C++ function of the same name. No decision is made here.
#include <algorithm>
#include <cstring>
#include <string>

#include "api/guard.hpp"
#include "api/text.hpp"
#include "flashqla/flashqla.h"
#include "flashqla/flashqla.hpp"

struct fqla_plan {
    flashqla::Plan plan;
};

namespace {

using namespace flashqla;

// Structs that grow at the end have no padding: its bytes would be taken for fields.
static_assert(sizeof(fqla_problem) == 112 && sizeof(fqla_plan_options) == 32 && sizeof(fqla_tensor) == 120);
static_assert(sizeof(fqla_forward_args) == 8 + 16 * sizeof(fqla_tensor));
static_assert(sizeof(fqla_backward_args) == 8 + 19 * sizeof(fqla_tensor));
static_assert(sizeof(fqla_decode_args) == 8 + 17 * sizeof(fqla_tensor));
static_assert(sizeof(fqla_commit_args) == 8 + 5 * sizeof(fqla_tensor));
static_assert(FQLA_MAX_RANK == kMaxRank && FQLA_CHUNK == kChunk && FQLA_MAX_DECODE_TOKENS == kMaxDecodeTokens);

thread_local std::string last_error;
thread_local bool last_error_lost = false;  // there was no memory for the sentence

fqla_status finish(const Status& status) noexcept {
    if (status.ok()) return FQLA_OK;
    try {
        last_error = status.message();
        last_error_lost = false;
    } catch (...) {
        last_error_lost = true;
    }
    return static_cast<fqla_status>(status.code());
}

// body() -> Status
template <class Body>
fqla_status run(const char* function, Body&& body) noexcept {
    return finish(guarded<Status>(function, std::forward<Body>(body)));
}

constexpr std::uint32_t kAbsurdSize = 1u << 16;

// A struct of any version of this interface: what the caller does not know keeps the default that `to` came with, and
// what this library does not know must be zero.
template <class Struct>
Status copy_struct(const char* function, const char* name, const Struct* from, Struct& to) {
    if (from == nullptr) return {Code::invalid_argument, say(function, ": ", name, " is null")};
    std::uint32_t size = 0;
    std::memcpy(&size, from, sizeof size);
    if (size < 8 || size > kAbsurdSize || size % 8 != 0) {
        return {Code::invalid_argument, say(function, ": ", name, "->struct_size is ", size,
                                            "; set it to the size of the struct, as the _init function does")};
    }
    const auto* bytes = reinterpret_cast<const unsigned char*>(from);
    const bool unknown = size > sizeof(Struct) && std::any_of(bytes + sizeof(Struct), bytes + size,
                                                              [](unsigned char byte) { return byte != 0; });
    if (unknown) {
        return {Code::unsupported, say(function, ": ", name, " sets fields that library version ", version(),
                                       " does not know; its struct has ", sizeof(Struct), " bytes, not ", size)};
    }
    std::memcpy(&to, from, std::min<std::size_t>(size, sizeof(Struct)));
    return {};
}

Device device_of(fqla_device device) noexcept {
    return {device.type == 0 ? DeviceType::cpu : static_cast<DeviceType>(device.type), device.index};
}

TensorView view_of(const fqla_tensor& tensor) noexcept {
    TensorView view;
    view.data = tensor.data;
    view.dtype = static_cast<DType>(tensor.dtype);
    view.rank = tensor.rank;
    std::copy_n(tensor.shape, kMaxRank, view.shape.begin());
    std::copy_n(tensor.stride, kMaxRank, view.stride.begin());
    view.device = device_of(tensor.device);
    return view;
}

Problem problem_of(const fqla_problem& from) noexcept {
    Problem to;
    to.batch = from.batch;
    to.tokens = from.tokens;
    to.sequences = from.sequences;
    to.heads_k = from.heads_k;
    to.heads_v = from.heads_v;
    to.dim_k = from.dim_k;
    to.dim_v = from.dim_v;
    to.io = static_cast<DType>(from.io);
    to.out = static_cast<DType>(from.out);
    to.gate = static_cast<Gate>(from.gate);
    to.beta_mode = static_cast<BetaMode>(from.beta_mode);
    to.beta_factor = from.beta_factor;
    to.qk_l2norm = from.qk_l2norm != 0;
    to.l2norm_eps = from.l2norm_eps;
    to.scale = from.scale;
    to.grouping = static_cast<Grouping>(from.grouping);
    to.state_layout = static_cast<StateLayout>(from.state_layout);
    to.pad_rule = static_cast<PadRule>(from.pad_rule);
    to.checkpoints = static_cast<Checkpoints>(from.checkpoints);
    to.checkpoint_every = from.checkpoint_every;
    to.decode_rows = from.decode_rows;
    to.for_backward = from.for_backward != 0;
    return to;
}

fqla_problem c_problem(const Problem& from) noexcept {
    fqla_problem to = fqla_problem_init();
    to.batch = from.batch;
    to.tokens = from.tokens;
    to.sequences = from.sequences;
    to.heads_k = from.heads_k;
    to.heads_v = from.heads_v;
    to.dim_k = from.dim_k;
    to.dim_v = from.dim_v;
    to.io = static_cast<std::int32_t>(from.io);
    to.out = static_cast<std::int32_t>(from.out);
    to.gate = static_cast<std::int32_t>(from.gate);
    to.beta_mode = static_cast<std::int32_t>(from.beta_mode);
    to.beta_factor = from.beta_factor;
    to.qk_l2norm = from.qk_l2norm ? 1 : 0;
    to.l2norm_eps = from.l2norm_eps;
    to.scale = from.scale;
    to.grouping = static_cast<std::int32_t>(from.grouping);
    to.state_layout = static_cast<std::int32_t>(from.state_layout);
    to.pad_rule = static_cast<std::int32_t>(from.pad_rule);
    to.checkpoints = static_cast<std::int32_t>(from.checkpoints);
    to.checkpoint_every = from.checkpoint_every;
    to.decode_rows = from.decode_rows;
    to.for_backward = from.for_backward ? 1 : 0;
    return to;
}

ForwardArgs args_of(const fqla_forward_args& from) noexcept {
    ForwardArgs to;
    to.q = view_of(from.q);
    to.k = view_of(from.k);
    to.v = view_of(from.v);
    to.g = view_of(from.g);
    to.beta = view_of(from.beta);
    to.A_log = view_of(from.A_log);
    to.dt_bias = view_of(from.dt_bias);
    to.cu_seqlens = view_of(from.cu_seqlens);
    to.initial_state = view_of(from.initial_state);
    to.final_state = view_of(from.final_state);
    to.state_indices = view_of(from.state_indices);
    to.state_indices_out = view_of(from.state_indices_out);
    to.has_initial_state = view_of(from.has_initial_state);
    to.checkpoints = view_of(from.checkpoints);
    to.checkpoint_list = view_of(from.checkpoint_list);
    to.o = view_of(from.o);
    return to;
}

BackwardArgs args_of(const fqla_backward_args& from) noexcept {
    BackwardArgs to;
    to.q = view_of(from.q);
    to.k = view_of(from.k);
    to.v = view_of(from.v);
    to.g = view_of(from.g);
    to.beta = view_of(from.beta);
    to.A_log = view_of(from.A_log);
    to.dt_bias = view_of(from.dt_bias);
    to.cu_seqlens = view_of(from.cu_seqlens);
    to.initial_state = view_of(from.initial_state);
    to.d_o = view_of(from.d_o);
    to.d_final_state = view_of(from.d_final_state);
    to.d_q = view_of(from.d_q);
    to.d_k = view_of(from.d_k);
    to.d_v = view_of(from.d_v);
    to.d_g = view_of(from.d_g);
    to.d_beta = view_of(from.d_beta);
    to.d_A_log = view_of(from.d_A_log);
    to.d_dt_bias = view_of(from.d_dt_bias);
    to.d_initial_state = view_of(from.d_initial_state);
    return to;
}

DecodeArgs args_of(const fqla_decode_args& from) noexcept {
    DecodeArgs to;
    to.q = view_of(from.q);
    to.k = view_of(from.k);
    to.v = view_of(from.v);
    to.g = view_of(from.g);
    to.beta = view_of(from.beta);
    to.A_log = view_of(from.A_log);
    to.dt_bias = view_of(from.dt_bias);
    to.cu_seqlens = view_of(from.cu_seqlens);
    to.state = view_of(from.state);
    to.state_indices = view_of(from.state_indices);
    to.state_indices_out = view_of(from.state_indices_out);
    to.has_initial_state = view_of(from.has_initial_state);
    to.num_accepted = view_of(from.num_accepted);
    to.intermediate_states = view_of(from.intermediate_states);
    to.intermediate_indices = view_of(from.intermediate_indices);
    to.parent_tokens = view_of(from.parent_tokens);
    to.o = view_of(from.o);
    to.commit_state = from.commit_state != 0;
    return to;
}

CommitArgs args_of(const fqla_commit_args& from) noexcept {
    CommitArgs to;
    to.state = view_of(from.state);
    to.state_indices = view_of(from.state_indices);
    to.intermediate_states = view_of(from.intermediate_states);
    to.intermediate_indices = view_of(from.intermediate_indices);
    to.accepted = view_of(from.accepted);
    return to;
}

// All four run functions: copy the struct, translate it, call the C++ function.
template <class CArgs, class Args>
fqla_status run_pass(const char* function, const fqla_plan* plan, const CArgs* args, CArgs defaults, void* workspace,
                     std::size_t bytes, void* stream,
                     Status (*pass)(const Plan&, const Args&, Workspace, Stream) noexcept) noexcept {
    return run(function, [&]() -> Status {
        if (plan == nullptr) return {Code::invalid_argument, say(function, ": plan is null")};
        if (Status status = copy_struct(function, "args", args, defaults); !status.ok()) return status;
        return pass(plan->plan, args_of(defaults), {workspace, bytes}, {stream});
    });
}

std::size_t write_text(const std::string& text, char* buffer, std::size_t size) noexcept {
    if (buffer != nullptr && size > 0) {
        const std::size_t count = std::min(text.size(), size - 1);
        std::memcpy(buffer, text.data(), count);
        buffer[count] = '\0';
    }
    return text.size();
}

// body() -> std::string
template <class Body>
std::size_t text(char* buffer, std::size_t size, Body&& body) noexcept {
    try {
        return write_text(body(), buffer, size);
    } catch (...) {
        if (buffer != nullptr && size > 0) buffer[0] = '\0';
        return 0;
    }
}

bool is_pass(std::int32_t pass) noexcept { return pass >= FQLA_FORWARD && pass <= FQLA_DECODE; }

}  // namespace

extern "C" {

fqla_tensor fqla_tensor_of(const void* data, int32_t dtype, int32_t rank, const int64_t* shape, const int64_t* stride) {
    fqla_tensor tensor = {};
    tensor.data = const_cast<void*>(data);
    tensor.dtype = dtype;
    tensor.rank = rank;
    tensor.device = fqla_cpu();
    std::uint64_t contiguous = 1;  // wraps instead of overflowing
    for (std::int32_t i = std::min(rank, kMaxRank); i-- > 0;) {
        tensor.shape[i] = shape[i];
        tensor.stride[i] = stride ? stride[i] : static_cast<std::int64_t>(contiguous);
        contiguous *= static_cast<std::uint64_t>(shape[i]);
    }
    return tensor;
}

fqla_status fqla_plan_create(const fqla_problem* problem, fqla_device device, const fqla_plan_options* options,
                             fqla_plan** plan) {
    constexpr const char* kName = "fqla_plan_create";
    if (plan != nullptr) *plan = nullptr;
    return run(kName, [&]() -> Status {
        if (plan == nullptr) return {Code::invalid_argument, say(kName, ": plan is null")};
        fqla_problem c_side = fqla_problem_init();
        if (Status status = copy_struct(kName, "problem", problem, c_side); !status.ok()) return status;
        fqla_plan_options c_options = fqla_plan_options_init();
        if (options != nullptr) {
            if (Status status = copy_struct(kName, "options", options, c_options); !status.ok()) return status;
        }
        PlanOptions plan_options;
        plan_options.backend = c_options.backend ? c_options.backend : "";
        plan_options.threads = c_options.threads;
        plan_options.context_split = c_options.context_split;
        plan_options.deterministic = c_options.deterministic != 0;
        plan_options.batch_invariant = c_options.batch_invariant != 0;
        const Result<Plan> made = Plan::create(problem_of(c_side), device_of(device), plan_options);
        if (made.ok()) *plan = new fqla_plan{made.value()};
        return made.status();
    });
}

void fqla_plan_destroy(fqla_plan* plan) { delete plan; }

size_t fqla_plan_workspace_bytes(const fqla_plan* plan, int32_t pass) {
    return plan && is_pass(pass) ? plan->plan.workspace_bytes(static_cast<Pass>(pass)) : 0;
}

const char* fqla_plan_backend(const fqla_plan* plan, int32_t pass) {
    // Names of backends are literals, so the view ends with '\0' and lives on.
    return plan && is_pass(pass) && !plan->plan.backend(static_cast<Pass>(pass)).empty()
               ? plan->plan.backend(static_cast<Pass>(pass)).data()
               : "";
}

int64_t fqla_plan_checkpoint_rows(const fqla_plan* plan) { return plan ? plan->plan.checkpoint_rows() : 0; }

fqla_status fqla_plan_problem(const fqla_plan* plan, fqla_problem* problem) {
    constexpr const char* kName = "fqla_plan_problem";
    return run(kName, [&]() -> Status {
        if (plan == nullptr) return {Code::invalid_argument, say(kName, ": plan is null")};
        fqla_problem checked = fqla_problem_init();
        if (Status status = copy_struct(kName, "problem", problem, checked); !status.ok()) return status;
        const std::uint32_t size = problem->struct_size;
        const fqla_problem filled = c_problem(plan->plan.problem());
        std::memcpy(problem, &filled, std::min<std::size_t>(size, sizeof filled));
        problem->struct_size = size;
        return {};
    });
}

size_t fqla_plan_explain(const fqla_plan* plan, char* buffer, size_t size) {
    return text(buffer, size, [&] { return plan ? plan->plan.explain() : std::string(); });
}

fqla_status fqla_forward(const fqla_plan* plan, const fqla_forward_args* args, void* workspace, size_t workspace_bytes,
                         void* stream) {
    return run_pass("fqla_forward", plan, args, fqla_forward_args_init(), workspace, workspace_bytes, stream, &forward);
}

fqla_status fqla_backward(const fqla_plan* plan, const fqla_backward_args* args, void* workspace,
                          size_t workspace_bytes, void* stream) {
    return run_pass("fqla_backward", plan, args, fqla_backward_args_init(), workspace, workspace_bytes, stream,
                    &backward);
}

fqla_status fqla_decode(const fqla_plan* plan, const fqla_decode_args* args, void* workspace, size_t workspace_bytes,
                        void* stream) {
    return run_pass("fqla_decode", plan, args, fqla_decode_args_init(), workspace, workspace_bytes, stream, &decode);
}

fqla_status fqla_commit(const fqla_plan* plan, const fqla_commit_args* args, void* workspace, size_t workspace_bytes,
                        void* stream) {
    return run_pass("fqla_commit", plan, args, fqla_commit_args_init(), workspace, workspace_bytes, stream, &commit);
}

const char* fqla_last_error(void) {
    return last_error_lost ? "flashqla: there was no memory for the sentence of the last error" : last_error.c_str();
}

const char* fqla_version(void) { return version(); }
int32_t fqla_abi_version(void) { return abi_version(); }
size_t fqla_backend_names(char* buffer, size_t size) { return text(buffer, size, backend_names); }
size_t fqla_system_info(char* buffer, size_t size) { return text(buffer, size, system_info); }

}  // extern "C"
