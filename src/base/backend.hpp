// What a backend is to the rest of the library: a row of functions in the candidate list (src/api/backends.cpp) and,
// for each planned pass, an object that holds its decisions and runs.
#pragma once

#include <memory>
#include <string>

#include "base/call.hpp"
#include "base/workspace.hpp"
#include "flashqla/flashqla.hpp"

namespace flashqla {

// Can this backend do it? An empty reason means yes.
struct Support {
    std::string reason;
    bool ok() const noexcept { return reason.empty(); }
};

struct PlanRequest {
    Problem problem;  // validated, defaults filled in
    Device device;
    PlanOptions options;
    Pass pass = Pass::forward;
};

// The decisions for one pass of one problem. Immutable; run functions are thread-safe and allocate nothing.
class PassPlan {
public:
    virtual ~PassPlan() = default;

    const WorkspaceLayout& workspace() const noexcept { return workspace_; }
    virtual std::string explain() const = 0;  // the decisions in one or more lines, no trailing newline

    // Only the function of the planned pass is called; a decode plan is also asked to commit, on devices whose memory
    // the host cannot read.
    virtual Status run(const ForwardCall&, std::byte* workspace, Stream) const noexcept;
    virtual Status run(const BackwardCall&, std::byte* workspace, Stream) const noexcept;
    virtual Status run(const DecodeCall&, std::byte* workspace, Stream) const noexcept;
    virtual Status run(const CommitCall&, std::byte* workspace, Stream) const noexcept;

protected:
    WorkspaceLayout workspace_;
};

struct Backend {
    const char* name;
    DeviceType device;
    Support (*supports)(const PlanRequest&);
    std::unique_ptr<PassPlan> (*plan)(const PlanRequest&);  // may throw std::bad_alloc; the caller catches
    std::string (*info)();                                  // a line for system_info(), such as the SIMD target
    std::string (*gpus)() = nullptr;                        // the GPUs this process sees, for system_info()
};

}  // namespace flashqla
