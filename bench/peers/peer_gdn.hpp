// Other people's CPU implementations of the gated delta rule, reached at run time through their shared libraries.
//
// Nothing of a peer is compiled in: the user names a shared object, and the loader looks for exported functions in it.
// Every peer has its own idea of layouts, head order and gates. A `PeerRun` puts one problem into the peer's own form
// once, outside the timed region, so that `run` measures the peer's arithmetic and nothing else.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace flashqla::bench {

// One sequence. All arrays are dense fp32 in the order FlashQLA uses.
struct PeerCase {
    int64_t T = 0;
    int64_t heads_k = 0;
    int64_t heads_v = 0;
    int64_t dim = 0;  // K = V: neither peer has other shapes
    int threads = 1;
    const float* q = nullptr;      // [T, heads_k, dim], l2-normalised
    const float* k = nullptr;      // [T, heads_k, dim], l2-normalised
    const float* v = nullptr;      // [T, heads_v, dim]
    const float* g = nullptr;      // [T, heads_v], natural log
    const float* beta = nullptr;   // [T, heads_v], in (0, 1)
    const float* state = nullptr;  // [states, heads_v, K, V]
    float* o = nullptr;            // [T, heads_v, dim], written by fetch
    float* final_state = nullptr;  // [heads_v, K, V], written by fetch
    int64_t states = 1;            // independent states; run(i) starts from number i
};

// A problem in the peer's own layouts, ready to be run any number of times.
class PeerRun {
public:
    virtual ~PeerRun() = default;

    // Runs the peer from state `slot`, whose contents may have been advanced by an earlier in-place run.
    virtual void run(int64_t slot) = 0;

    // Restores every state, runs slot 0 once, and writes its result to the case's `o` and `final_state`.
    virtual void fetch() = 0;
};

// Where the new state goes.
enum class StateUpdate {
    to_output,  // a separate buffer, one for all slots; the initial states stay as they are
    in_place,   // over the initial state, as a decoder with a state per sequence wants it
};

class Peer {
public:
    virtual ~Peer() = default;
    virtual std::string name() const = 0;
    virtual bool supports(StateUpdate update) const = 0;
    virtual std::unique_ptr<PeerRun> prepare(const PeerCase& problem, StateUpdate update) = 0;
};

// ggml's `ggml_gated_delta_net` on ggml's CPU backend. `library` is a ggml built as shared libraries.
std::unique_ptr<Peer> load_ggml(const std::string& library);

// ik_llama.cpp's `iqk_fused_delta_net`. `library` is any shared object that exports this C function.
std::unique_ptr<Peer> load_ik_llama(const std::string& library);

// The recurrence itself in double precision; `o` and `final_state` as in PeerCase, but double. Starts from state 0.
void reference_recurrence(const PeerCase& problem, double* o, double* final_state);

}  // namespace flashqla::bench
