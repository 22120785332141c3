// The tensors of one call that a case describes, filled from its seed, and what a correct call may write.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "cases/case.hpp"
#include "cases/host_tensor.hpp"

namespace flashqla::cases {

// Which sequence and which first token of the case's data a sequence of the call stands for. Lets one sequence be
// computed alone, or a later piece of it, from the same numbers.
struct Origin {
    std::int64_t sequence = 0, token = 0;
};

struct Setup {
    bool oracle = false;          // contiguous tensors, f32 outputs and states that hold the rounded values
    std::vector<Origin> origins;  // for each sequence; empty: sequence n is n, from token 0
    // Start states by sequence, [Hv,K,V] each, instead of drawn ones.
    std::vector<std::vector<float>> start;
    bool without_states = false;  // leave states poisoned: the caller brings its own pool
};

// Where a token row of the call comes from; sequence < 0: padding.
struct Row {
    std::int64_t sequence = -1, token = 0;
};

struct Instance {
    Problem problem;
    std::vector<HostTensor> tensors;  // every tensor that was given
    std::vector<std::string> outputs;
    std::vector<Row> rows;  // B*T
    ForwardArgs forward;
    BackwardArgs backward;
    DecodeArgs decode;
    CommitArgs commit;
    bool with_commit = false;

    const HostTensor* find(const std::string& name) const;
    bool is_output(const std::string& name) const;
    void take_snapshots();
    void restore();
    // Sentences about bytes that changed although nobody may write them.
    std::vector<std::string> forbidden_changes() const;
    std::int64_t bytes() const;  // of all tensors
};

Problem problem_of(const Case& c);
PlanOptions options_of(const Case& c);
// The plan of the case on its device, as its line asks for.
Result<Plan> plan_of(const Case& c);

Instance make_instance(const Case& c, const Setup& setup = {});

// Logical values of an output that belong to sequence n: its token rows in order, or its state row. Gradients of
// A_log and dt_bias belong to no sequence and come back empty.
std::vector<float> values_of_sequence(const Case& c, const Instance& instance, const std::string& output,
                                      std::int64_t n);

}  // namespace flashqla::cases
