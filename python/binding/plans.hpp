// Plans, made once for each problem and kept.
#pragma once

#include <tvm/ffi/string.h>

#include "tensors.hpp"

namespace flashqla::python {

// The options of a call in one integer, so that a call has few arguments to convert. python/flash_qla/_modes.py is the
// other half of this table.
enum Modes : std::int64_t {
    kGateShift = 0,  // two bits, Gate
    kBetaLogit = 1 << 2,
    kBetaTwice = 1 << 3,
    kL2Norm = 1 << 4,
    kTiled = 1 << 5,
    kStateVFirst = 1 << 6,
    kPadNonPositive = 1 << 7,
    kCheckpointShift = 8,  // two bits, Checkpoints
    kForBackward = 1 << 10,
    kDeterministic = 1 << 11,
    kBatchInvariant = 1 << 12,
    kBf16AsU16 = 1 << 13,  // Extra::bf16_as_u16
};

inline Extra extra_of(std::int64_t modes) noexcept { return modes & kBf16AsU16 ? Extra::bf16_as_u16 : Extra::none; }

// What a call asks for beyond its tensors.
struct Settings {
    std::int64_t modes = 0;
    double scale = 0.0;  // 0 = K^-1/2
    std::int64_t checkpoint_every = 0;
    std::int64_t decode_rows = 0;
    std::string backend;  // "" = the best
    std::int64_t threads = 0;
    std::int64_t context_split = 0;
};

// The problem that these tensors and settings describe; shapes that no problem has are refused.
Problem problem_of(const TensorView& q, const TensorView& v, const TensorView& cu_seqlens, DType out,
                   const Settings& settings);
PlanOptions options_of(const Settings& settings);

// A plan for the problem: found among the last ones used by any thread, or made. Plan::create takes microseconds to
// tens of them, and a model asks for the same few problems in every layer and step.
Plan cached_plan(const Problem& problem, Device device, const PlanOptions& options);

struct CacheCounts {
    std::int64_t kept, made, found;
};
CacheCounts cache_counts();

// Called in the child of a fork. NOTE: GNU OpenMP's threads do not exist there and waiting for them would never end,
// so a forked child plans for one thread. (Children of multiprocessing's "spawn" are not affected.)
void after_fork() noexcept;

}  // namespace flashqla::python
