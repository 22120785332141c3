// FlashQLA seen as one more contender: the same problem through the public C++ API, in the dtypes asked for.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "flashqla/flashqla.hpp"
#include "peer_gdn.hpp"

namespace flashqla::bench {

struct Precision {
    DType io = DType::f32;     // q, k, v, o and, going backward, their gradients
    DType state = DType::f32;  // g and beta are always f32
};

// The nearest value of `dtype`, as float.
float rounded(float x, DType dtype);

// FlashQLA's forward on a case of peer_gdn.hpp; the new state goes where a peer with StateUpdate::to_output puts it.
std::unique_ptr<PeerRun> prepare_forward(const PeerCase& problem, Precision precision);

// FlashQLA's decode: `states` slots of a pool, updated in place.
std::unique_ptr<PeerRun> prepare_decode(const PeerCase& problem, Precision precision);

// Forward and backward of the same problem, with every gradient wanted.
class TrainingStep {
public:
    virtual ~TrainingStep() = default;
    virtual void forward() = 0;
    virtual void backward() = 0;
    virtual std::vector<std::vector<float>> gradients() const = 0;  // dq dk dv dg dbeta d_initial_state
};

// `backend`: "" for the best one, or a name from backend_names().
std::unique_ptr<TrainingStep> prepare_training(const PeerCase& problem, Precision precision, const float* d_o,
                                               const std::string& backend);

// Name of the backend that serves a pass of this problem; "" when the library refuses it.
std::string serving_backend(const PeerCase& problem, Precision precision, Pass pass);

}  // namespace flashqla::bench
