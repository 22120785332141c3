// Runs a case through the public API and judges it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cases/compare.hpp"
#include "cases/instance.hpp"

namespace flashqla::cases {

// Scratch memory for a plan: 64-byte aligned, poisoned, with canary zones.
class Scratch {
public:
    explicit Scratch(std::size_t bytes, Device device = {});
    Workspace workspace() const noexcept;
    void poison();
    bool intact() const;  // the canary zones

private:
    std::size_t bytes_;
    std::shared_ptr<std::byte> memory_;
};

// One call (and commit(), where the case has one) on a stream, whose end is not waited for.
Status submit(const Case& c, const Plan& plan, const Instance& instance, Workspace workspace, Stream stream = {});

// One call (and commit(), where the case has one) on an instance; on a GPU, its end is waited for.
Status call(const Case& c, const Plan& plan, Instance& instance, Workspace workspace);

struct Execution {
    Status status;
    Instance instance;
    std::string backend;
    std::size_t workspace_bytes = 0;
    std::vector<std::string> faults;  // forbidden writes
};

// Plans and runs the case once on fresh, poisoned memory.
Execution execute(const Case& c, const Setup& setup = {});

// What the oracle says: every output by name.
struct Oracle {
    Status status;
    std::map<std::string, Reference> outputs;
};
std::shared_ptr<const Oracle> ask_oracle(const Case& c);

enum class Verdict { passed, failed, unsupported };

struct Report {
    Case tested;
    Verdict verdict = Verdict::passed;
    std::string backend;
    std::string message;  // of the status, when the call was refused
    std::size_t workspace_bytes = 0;
    std::vector<OutputError> outputs;
    std::vector<std::string> faults;  // sentences, everything that is wrong beyond the values
    double worst_rel_l2() const;      // over outputs and heads
};

// `oracle` may be given when it is known already.
Report check_case(const Case& c, std::shared_ptr<const Oracle> oracle = nullptr);

// Lines for a person: one a case that passes, one an output that fails (every head when verbose), and the command that
// reproduces a failure.
std::string text_of(const Report& report, bool verbose);

// Properties a case asks for (repeat=, alone, ...), as faults.
std::vector<std::string> check_properties(const Case& c, const Execution& first);

}  // namespace flashqla::cases
