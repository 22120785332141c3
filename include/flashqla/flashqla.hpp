// FlashQLA: Gated Delta Net (GDN) linear attention. The C++20 contract; needs the standard library only.
//
//   Problem  what is computed: sizes as bounds, dtypes, modes
//   Plan     every decision, made once: backend, split, workspace; immutable, shareable between threads
//   run      forward / backward / decode on the caller's tensors, workspace and stream
//
// The rule, per sequence and value head, with state S (K x V), for each token t in this order:
//   1. decay   S <- exp(g_t) S                                          g_t <= 0
//   2. delta   d_t = beta_t (v_t - S^T k_t),   S <- S + k_t d_t^T
//   3. read    o_t = scale * S^T q_t                                    scale defaults to K^-1/2
// (Yang, Kautz, Hatamizadeh: "Gated Delta Networks", 2024. docs/math.md states every form used here.)
//
// Contract of the run functions: they allocate nothing, never synchronise a device, never print, exit or throw,
// never write to an input, and work only on the given stream. Errors are values that hold one full sentence.
//
// Letters used in shapes: B batch, T tokens, N sequences, Hk key heads, Hv value heads (a multiple of Hk),
// K and V head sizes, C = 64 the chunk. Strides count elements. The last stride of every tensor is 1 (or the
// last size is 1); all other strides are free, so slices of one packed q|k|v tensor need no copy.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#if defined(FQLA_STATIC)
#define FQLA_API
#elif defined(__GNUC__)
#define FQLA_API [[gnu::visibility("default")]]
#else
#define FQLA_API
#endif

namespace flashqla {

// ---------------------------------------------------------------------------------------------------- errors

enum class Code : std::int32_t {
    ok = 0,
    invalid_argument = 1,     // the sentence names the argument, what was found and what is allowed
    unsupported = 2,          // well formed, but no backend can do it; the sentence says why each one refused
    workspace_too_small = 3,  // the sentence says how many bytes the plan needs
    out_of_memory = 4,        // only Plan::create allocates
    device_error = 5,
    communication_error = 6,
    internal = 7,
};

// A code and one full sentence. Success costs a null pointer.
class [[nodiscard]] FQLA_API Status {
public:
    Status() noexcept = default;
    Status(Code code, std::string message);

    bool ok() const noexcept { return detail_ == nullptr; }
    explicit operator bool() const noexcept { return ok(); }
    Code code() const noexcept;
    const std::string& message() const noexcept;  // empty when ok

private:
    struct Detail;
    std::shared_ptr<const Detail> detail_;
};

// Either a value or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
public:
    Result(T value) : content_(std::in_place_index<0>, std::move(value)) {}
    Result(Status status) : content_(std::in_place_index<1>, std::move(status)) {}

    bool ok() const noexcept { return content_.index() == 0; }
    explicit operator bool() const noexcept { return ok(); }
    T& value() & { return std::get<0>(content_); }
    const T& value() const& { return std::get<0>(content_); }
    T&& value() && { return std::get<0>(std::move(content_)); }
    T* operator->() { return &std::get<0>(content_); }
    const T* operator->() const { return &std::get<0>(content_); }
    Status status() const { return ok() ? Status{} : std::get<1>(content_); }

private:
    std::variant<T, Status> content_;
};

// For programs that prefer exceptions. The library itself never throws.
inline void check(const Status& status) {
    if (!status.ok()) throw std::runtime_error(status.message());
}
template <class T>
T check(Result<T> result) {
    check(result.status());
    return std::move(result).value();
}

// --------------------------------------------------------------------------------------------------- tensors

enum class DType : std::int32_t { none = 0, f32 = 1, f16 = 2, bf16 = 3, i32 = 4, i64 = 5, u8 = 6 /* also bool */ };

enum class DeviceType : std::int32_t { cpu = 1, cuda = 2 };  // DLPack's numbers

struct Device {
    DeviceType type = DeviceType::cpu;
    std::int32_t index = 0;
    friend bool operator==(const Device&, const Device&) = default;
};

inline constexpr int kMaxRank = 6;
inline constexpr std::int64_t kChunk = 64;            // chunk starts: token 0, 64, 128, ... of each sequence
inline constexpr std::int64_t kMaxDecodeTokens = 16;  // longest run of tokens a row of decode() may have

// A view of the caller's memory; never owns. Default-constructed = "not given".
struct TensorView {
    void* data = nullptr;
    DType dtype = DType::none;
    std::int32_t rank = 0;
    std::array<std::int64_t, kMaxRank> shape{};
    std::array<std::int64_t, kMaxRank> stride{};  // in elements
    Device device{};

    bool given() const noexcept { return dtype != DType::none; }
};

// Contiguous view, last dimension fastest. NOTE: const is dropped for inputs; the library never writes to them.
FQLA_API TensorView tensor(const void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                           Device device = {}) noexcept;
FQLA_API TensorView tensor(const void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                           std::initializer_list<std::int64_t> stride, Device device = {}) noexcept;

FQLA_API std::size_t size_of(DType dtype) noexcept;  // bytes of an element; 0 for none
FQLA_API const char* name_of(DType dtype) noexcept;  // "f32", "bf16", ...

struct Stream {
    void* handle = nullptr;  // cudaStream_t; ignored by CPU backends
};

// Scratch memory owned by the caller, 64-byte aligned. Its content means nothing before and after a call.
struct Workspace {
    void* data = nullptr;
    std::size_t bytes = 0;
};

// --------------------------------------------------------------------------------------------------- problem

enum class Gate : std::int32_t {
    none = 0,    // no decay; g is not given
    log = 1,     // g [B,T,Hv] is the natural log of the decay
    raw = 2,     // g_t = -exp(A_log) * softplus(g + dt_bias); softplus has beta 1 and threshold 20
    vector = 3,  // g [B,T,Hv,K], a gate per key channel (KDA). Reserved: every backend refuses it for now
};
enum class BetaMode : std::int32_t {
    value = 0,  // beta is used as it is, times beta_factor
    logit = 1,  // beta_factor * sigmoid(beta)
};
enum class Grouping : std::int32_t {
    interleaved = 0,  // value head h reads key head h / (Hv/Hk)
    tiled = 1,        // value head h reads key head h % Hk
};
enum class StateLayout : std::int32_t {
    kv = 0,  // [.., Hv, K, V]
    vk = 1,  // [.., Hv, V, K]  ("state_v_first")
};
enum class PadRule : std::int32_t {
    negative = 0,      // a slot < 0 marks a padding row; slot 0 is real
    non_positive = 1,  // a slot <= 0 marks a padding row
};
enum class Checkpoints : std::int32_t {
    none = 0,
    chunk_starts = 1,  // the state entering token 0, 64, 128, ... of each sequence; ceil(len/64) rows each
    every_n = 2,       // the state after n, 2n, 3n, ... tokens of each sequence; floor(len/n) rows each
    listed = 3,        // the state after `token` tokens of `sequence`, one row for each (sequence, token) pair
};

// What is computed. Sizes are bounds where the text says so; lengths stay in cu_seqlens, on the device.
struct Problem {
    std::int64_t batch = 1;      // B; 1 when packed
    std::int64_t tokens = 0;     // T; when packed, the rows of the token dimension (padding included)
    std::int64_t sequences = 0;  // 0: fixed length, one sequence a batch row. > 0: packed, cu_seqlens has sequences + 1
    std::int32_t heads_k = 0;    // Hk
    std::int32_t heads_v = 0;    // Hv, a multiple of Hk
    std::int32_t dim_k = 0;      // K
    std::int32_t dim_v = 0;      // V

    DType io = DType::bf16;   // q, k, v: f32, f16 or bf16
    DType out = DType::none;  // o: none = as io; or f32

    Gate gate = Gate::log;
    BetaMode beta_mode = BetaMode::value;
    float beta_factor = 1.0f;  // 1, or 2 for negative eigenvalues
    bool qk_l2norm = false;    // x / sqrt(sum x^2 + l2norm_eps) on the rows of q and k
    float l2norm_eps = 1e-6f;
    float scale = 0.0f;  // 0 = K^-1/2
    Grouping grouping = Grouping::interleaved;
    StateLayout state_layout = StateLayout::kv;  // of every state tensor of the call
    PadRule pad_rule = PadRule::negative;        // of every slot index of the call

    Checkpoints checkpoints = Checkpoints::none;
    std::int64_t checkpoint_every = 0;  // n of every_n

    // Mixed batches: the first decode_rows sequences of a packed call are short (decode), the rest are prefill.
    // A promise about lengths (each at most kMaxDecodeTokens) that helps planning; results do not depend on it.
    std::int64_t decode_rows = 0;

    bool for_backward = false;  // plan backward() too
};

struct PlanOptions {
    std::string backend;             // "" = the best that can; or a name from backend_names()
    std::int32_t threads = 0;        // CPU: 0 = as many as OpenMP would use
    std::int32_t context_split = 0;  // segments a sequence is cut into (context parallelism): 0 = auto, 1 = never, n
    // The bits of a result always depend on the plan and the inputs alone. deterministic additionally makes them
    // independent of the number of threads; it costs the automatic split by time when there are few heads.
    bool deterministic = false;
    // A sequence's bits do not depend on its neighbours in the batch, nor on the number of threads.
    // NOTE: they may depend on where its checkpoints lie: a chunk ends at each, so `o` can differ in its last bits from
    // a run without checkpoints.
    bool batch_invariant = false;
};

enum class Pass : std::int32_t { forward = 0, backward = 1, decode = 2 };

// Every decision about a Problem on a device. Immutable and thread-safe; holds no pointer to user data. One plan may
// run on many threads at once, each with its own workspace.
class FQLA_API Plan {
public:
    Plan() noexcept = default;  // empty; run functions refuse it

    static Result<Plan> create(const Problem& problem, Device device = {}, const PlanOptions& options = {}) noexcept;

    const Problem& problem() const noexcept;  // with the defaults filled in (out, scale)
    Device device() const noexcept;
    std::string_view backend(Pass pass) const noexcept;     // "" when the pass was not planned
    std::size_t workspace_bytes(Pass pass) const noexcept;  // 64-byte aligned size; may be 0
    std::int64_t checkpoint_rows() const noexcept;          // upper bound of rows of the checkpoint tensor
    std::string explain() const;  // the choice for each pass, why each better backend refused, the workspace map

    struct Impl;
    const Impl* impl() const noexcept { return impl_.get(); }

private:
    std::shared_ptr<const Impl> impl_;
};

// --------------------------------------------------------------------------------------------------- forward

// States (`initial_state`, `final_state`, pools) are [N or slots, Hv, K, V] or [.., Hv, V, K] by Problem::state_layout,
// in f32, f16 or bf16; the inner two dimensions are contiguous, the strides of the outer two are free.
//
// Without state_indices, row n of a state tensor belongs to sequence n. With state_indices the state tensors are pools:
// sequence n reads slot state_indices[n] and writes slot state_indices_out[n] (default: the same). A padding slot
// (PadRule) makes the sequence a padding row: its outputs and checkpoints are zero and no slot is touched. Slots that
// are written must be unique, and where initial and final state are the same memory no other row may read them. A slot
// at or above the pool's size is refused where the host sees it (CPU) and taken as padding where it cannot (CUDA).
struct ForwardArgs {
    TensorView q;        // [B,T,Hk,K] Problem::io
    TensorView k;        // [B,T,Hk,K] Problem::io
    TensorView v;        // [B,T,Hv,V] Problem::io
    TensorView g;        // [B,T,Hv] f32/f16/bf16; not given with Gate::none
    TensorView beta;     // [B,T,Hv] f32/f16/bf16; not given: beta_t = beta_factor in both modes
    TensorView A_log;    // [Hv] f32/f16/bf16, Gate::raw only
    TensorView dt_bias;  // [Hv] f32/f16/bf16, Gate::raw only; not given = 0

    // [N+1] i32/i64, on the plan's device; starts at 0, never decreases, ends at or before T. Empty sequences are
    // allowed: their final state is their initial state. Tokens past the last offset give zeros in every output.
    TensorView cu_seqlens;

    TensorView initial_state;      // not given = zeros
    TensorView final_state;        // not given = not wanted. May be the same memory as initial_state (in place)
    TensorView state_indices;      // [N] i32/i64, any stride
    TensorView state_indices_out;  // [N] i32/i64, any stride
    TensorView has_initial_state;  // [N] u8 (bool) or i32; 0 = start from zeros whatever the slot holds, NaN included

    TensorView checkpoints;  // [rows, Hv, ..] as a state tensor; sequences one after another
    // [rows,2] i32/i64 of (sequence, token), 0 <= token <= length; a pair may repeat; sequence < 0: row stays as it is
    TensorView checkpoint_list;

    TensorView o;  // [B,T,Hv,V] Problem::out
};

// Computes o, the final state and the checkpoints. Source: the rule at the top of this file.
FQLA_API Status forward(const Plan& plan, const ForwardArgs& args, Workspace workspace, Stream stream = {}) noexcept;

// -------------------------------------------------------------------------------------------------- backward

// Gradients of  <d_o, o> + <d_final_state, final_state>. Either of the two may be absent (zero). Every output may be
// absent (not wanted). States belong to sequences here: pools are a serving feature and have no gradient. Gradients are
// f32, f16 or bf16 each. For an empty sequence d_initial_state = d_final_state. Where exp(g) underflows to 0 (g = -inf
// is allowed) the gradient of g is 0.
struct BackwardArgs {
    TensorView q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state;  // as in ForwardArgs
    TensorView d_o;                                                          // [B,T,Hv,V]
    TensorView d_final_state;                                                // [N,Hv,..]
    TensorView d_q;              // [B,T,Hk,K]  summed over the head group in f32
    TensorView d_k;              // [B,T,Hk,K]
    TensorView d_v;              // [B,T,Hv,V]
    TensorView d_g;              // [B,T,Hv]    of the argument g, i.e. through softplus with Gate::raw
    TensorView d_beta;           // [B,T,Hv]    of the argument beta, i.e. through sigmoid and beta_factor
    TensorView d_A_log;          // [Hv]        Gate::raw
    TensorView d_dt_bias;        // [Hv]        Gate::raw
    TensorView d_initial_state;  // [N,Hv,..]
};

FQLA_API Status backward(const Plan& plan, const BackwardArgs& args, Workspace workspace, Stream stream = {}) noexcept;

// ---------------------------------------------------------------------------------------------------- decode

// One token or a short run (T <= 16) for each of N rows, on a pool of states, in place. Rows are [B,T] with B = N, or
// packed with cu_seqlens and at most 16 tokens each. Plain decode: T = 1 and state_indices [N].
//
// Speculative verification, two contracts:
//  - a slot per token: state_indices is [N,S], S >= T. The state after token t goes to slot state_indices[n,t]. The
//    start state is slot state_indices[n, num_accepted[n]-1] (num_accepted not given: 1). num_accepted outside
//    1..S makes the row a padding row. Padding slots among the targets are skipped.
//  - intermediate buffer: the state after token t goes to intermediate_states[m,t], m = intermediate_indices[n]
//    (default n; m < 0: not stored). With commit_state = false the pool stays as it is until commit().
// parent_tokens [N,T] i32 makes the run a tree: token t continues from the state after token parent_tokens[n,t] < t, or
// from the start state when that is < 0. It needs intermediate_states with a valid row, and commit_state = false. With
// a 16-bit buffer, a token whose parent is not the token before it may continue from the parent's rounded state.
// intermediate_indices must be unique.
struct DecodeArgs {
    TensorView q, k, v, g, beta, A_log, dt_bias, cu_seqlens;  // as in ForwardArgs
    TensorView state;                                         // the pool [slots, Hv, ..], updated in place
    TensorView state_indices;                                 // [N] or [N,S] i32/i64; not given: row n uses slot n
    TensorView state_indices_out;     // [N] i32/i64: write here instead of the slot that was read
    TensorView has_initial_state;     // [N] u8 or i32
    TensorView num_accepted;          // [N] i32/i64, with state_indices [N,S]
    TensorView intermediate_states;   // [M, >=T, Hv, ..]
    TensorView intermediate_indices;  // [N] i32/i64
    TensorView parent_tokens;         // [N, >=T] i32/i64
    TensorView o;                     // [B,T,Hv,V] Problem::out
    bool commit_state = true;
};

FQLA_API Status decode(const Plan& plan, const DecodeArgs& args, Workspace workspace, Stream stream = {}) noexcept;

// Second half of the intermediate-buffer contract: state[state_indices[n]] <- intermediate_states[m, accepted[n]-1].
// Rows with a padding slot, m < 0, or accepted[n] outside 1..T stay as they are. accepted: [N] i32/i64. It is the
// caller's duty to accept no more tokens than the row had.
struct CommitArgs {
    TensorView state, state_indices, intermediate_states, intermediate_indices, accepted;
};

FQLA_API Status commit(const Plan& plan, const CommitArgs& args, Workspace workspace, Stream stream = {}) noexcept;

// ----------------------------------------------------------------------------------------------- information

FQLA_API const char* version() noexcept;       // "0.1.0"
FQLA_API std::int32_t abi_version() noexcept;  // changes when the C ABI does
FQLA_API std::string backend_names();          // the candidate list, best first, comma separated
FQLA_API std::string system_info();            // build, backends, CPU features, GPUs; one "name: value" a line

}  // namespace flashqla
