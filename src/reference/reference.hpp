// The oracle: the token recurrence in double, one thread, no SIMD, every option. Slow and obvious on purpose: the
// other backends are compared with it, and it is the last row of the candidate list.
#pragma once

#include "base/backend.hpp"

namespace flashqla {

extern const Backend kReferenceBackend;

namespace reference {

// Workspace of a run. The last six are for backward only.
struct Scratch {
    double* token;   // one Token
    double* states;  // [1,K,V] forward, [17,K,V] decode, [segment+1,K,V] backward
    std::int64_t segment;
    double* starts;               // [segments,K,V] states at the start of each segment
    double* d_state;              // [K,V]
    double *d_q, *d_k;            // [T,K] of one key head
    double *d_A_log, *d_dt_bias;  // [Hv]
};

Status forward(const ForwardCall&, const Scratch&) noexcept;
Status backward(const BackwardCall&, const Scratch&) noexcept;
Status decode(const DecodeCall&, const Scratch&) noexcept;

}  // namespace reference
}  // namespace flashqla
