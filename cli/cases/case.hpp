// A case: one line of text that says what to compute, on which inputs, and what to check beyond the values. The same
// line works in `flashqla check`, `flashqla bench`, `flashqla plan` and in the conformance tables.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "flashqla/flashqla.hpp"

namespace flashqla::cases {

// How the gates are drawn. With Gate::raw the same names describe the gate that comes out of softplus, except
// `constant`, which is the raw value itself.
struct GateDraw {
    enum class Kind { weak, typical, strong, zero, mixed, half0, alpha0, cliff, published, constant, uniform };
    Kind kind = Kind::typical;
    double low = 0, high = 0;  // constant: low; uniform: alpha in [low, high]
    friend bool operator==(const GateDraw&, const GateDraw&) = default;
};

enum class Keys { unit, normal, raw, same };
enum class Verify { none, slots, buffer, tree };
enum class Expect { ok, unsupported, invalid };

struct Case {
    Pass pass = Pass::forward;

    // Sizes.
    std::int64_t batch = 1, tokens = 64;
    std::int32_t heads_k = 1, heads_v = 1, dim_k = 128, dim_v = 128;
    std::vector<std::int64_t> lens;  // empty: fixed length
    std::int64_t decode_rows = 0;

    // Element types; none = as io.
    DType io = DType::f32, out = DType::none, state = DType::f32, grad = DType::none;
    DType g_type = DType::f32, beta_type = DType::f32, index = DType::i32;

    // The rule.
    Gate gate = Gate::log;
    GateDraw g;
    BetaMode beta_mode = BetaMode::value;
    bool beta_given = true, beta_constant = false, negative = false;
    double beta_value = 0;  // when beta_constant
    bool l2norm = false;
    double scale = 0;
    StateLayout layout = StateLayout::kv;
    Grouping grouping = Grouping::interleaved;
    Keys keys = Keys::unit;

    // States.
    bool initial = false, final = true, in_place = false;
    double initial_scale = 0.3;
    std::int64_t pool = 0;                       // 0: no pool, row n belongs to sequence n
    std::vector<std::int64_t> slots, out_slots;  // state_indices ([N] or [N,columns]) and state_indices_out
    PadRule pad = PadRule::negative;
    std::vector<std::int64_t> has_initial;
    Checkpoints checkpoints = Checkpoints::none;
    std::int64_t checkpoint_every = 0;
    std::vector<std::pair<std::int64_t, std::int64_t>> checkpoint_list;  // (sequence, token)

    // Speculative verification.
    Verify verify = Verify::none;
    std::int64_t columns = 0;  // S of state_indices [N,S]; 0 = T
    std::vector<std::int64_t> accepted, buffer_rows;
    bool commit = true;  // DecodeArgs::commit_state

    // Backward.
    bool drop_d_o = false, drop_d_final = false;
    std::vector<std::string> skip;  // outputs that are not wanted

    // Memory and plan.
    bool strided = false;
    std::int32_t threads = 0, split = 0;
    bool deterministic = false, batch_invariant = false;
    std::string backend;
    Device device;  // no item of the line: the same cases run on every device
    std::uint64_t seed = 1;

    // Properties beyond the values.
    Expect expect = Expect::ok;
    bool same_packed = false, alone = false, threads_bitwise = false, decode_equals_prefill = false;
    std::int64_t repeat = 0, relens = 0, steps = 0;
    std::int64_t split_prefill = 0;  // tokens of the first piece; -1 = half

    bool packed() const noexcept { return !lens.empty(); }
    std::int64_t sequences() const noexcept { return packed() ? static_cast<std::int64_t>(lens.size()) : batch; }
    std::int64_t tokens_per_row() const;  // decode: the longest run of a row
    std::int64_t length(std::int64_t n) const { return packed() ? lens[static_cast<std::size_t>(n)] : tokens; }
    bool wants(std::string_view output) const;

    friend bool operator==(const Case&, const Case&) = default;
};

}  // namespace flashqla::cases
