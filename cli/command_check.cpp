#include <cstdio>
#include <memory>

#include "cases/random_case.hpp"
#include "cases/runner.hpp"
#include "commands.hpp"
#include "terminal.hpp"

namespace flashqla::cli {

Command add_check(CLI::App& app) {
    struct Options : CaseOptions {
        bool verbose = false, quiet = false;
        int random = 0;
        std::uint64_t seed = 1;
    };
    auto options = std::make_shared<Options>();
    options->add_to(app);
    app.add_flag("-v,--verbose", options->verbose, "Print the errors of every head of every output");
    app.add_flag("-q,--quiet", options->quiet, "Print cases that fail, and the totals");
    app.add_option("--random", options->random, "Also check this many random cases")
        ->check(CLI::Range(1, 100000000))
        ->type_name("COUNT");
    app.add_option("--seed", options->seed, "Of the random cases")->capture_default_str();
    return [options] {
        std::vector<cases::Case> list = options->read();
        for (int i = 0; i < options->random; ++i) {
            list.push_back(cases::random_case(options->seed + static_cast<std::uint64_t>(i)));
            list.back().backend = options->backend;
            list.back().device = options->where();
            if (options->threads > 0) list.back().threads = options->threads;
        }
        if (list.empty()) {
            throw Failure{kWrongInput, "check: no case was given; a CASE, --table FILE or --random COUNT is needed"};
        }
        std::size_t passed = 0, failed = 0, unsupported = 0;
        bool refused = false;
        Progress progress("check", list.size());
        for (const cases::Case& c : list) {
            progress.show(passed + failed + unsupported, cases::to_line(c));
            const cases::Report report = cases::check_case(c);
            switch (report.verdict) {
                case cases::Verdict::passed: ++passed; break;
                case cases::Verdict::failed: ++failed; break;
                case cases::Verdict::unsupported: ++unsupported; break;
            }
            refused = refused ||
                      (report.verdict == cases::Verdict::failed && report.outputs.empty() && !report.message.empty());
            if (options->quiet && report.verdict == cases::Verdict::passed) continue;
            progress.clear();
            std::fputs(cases::text_of(report, options->verbose).c_str(), stdout);
            std::fflush(stdout);
        }
        progress.clear();
        std::printf("%zu passed, %zu failed", passed, failed);
        if (unsupported > 0) std::printf(", %zu unsupported", unsupported);
        std::printf("\n");
        // A single case that the library refuses is wrong input rather than a wrong result.
        if (refused && list.size() == 1) return kWrongInput;
        return failed > 0 ? kCheckFailed : unsupported > 0 ? kUnsupported : kOk;
    };
}

}  // namespace flashqla::cli
