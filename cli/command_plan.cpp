#include <cstdio>
#include <memory>

#include "cases/instance.hpp"
#include "commands.hpp"

namespace flashqla::cli {

Command add_plan(CLI::App& app) {
    auto options = std::make_shared<CaseOptions>();
    options->add_to(app);
    return [options] {
        const std::vector<cases::Case> list = options->read();
        if (list.empty()) throw Failure{kWrongInput, "plan: no case was given; at least one is needed"};
        for (const cases::Case& c : list) {
            const Result<Plan> plan = cases::plan_of(c);
            std::printf("%s\n", cases::to_line(c).c_str());
            if (!plan.ok()) throw Failure{exit_code(plan.status().code()), plan.status().message()};
            const std::string backend(plan->backend(c.pass));
            std::printf("backend: %s\nworkspace: %zu bytes\n", backend.empty() ? "none" : backend.c_str(),
                        plan->workspace_bytes(c.pass));
            if (c.checkpoints != Checkpoints::none) {
                std::printf("checkpoint rows: %lld\n", static_cast<long long>(plan->checkpoint_rows()));
            }
            std::printf("%s\n", plan->explain().c_str());
            if (backend.empty()) return kUnsupported;
        }
        return kOk;
    };
}

}  // namespace flashqla::cli
