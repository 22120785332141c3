// The commands of the tool. Each registers its options and returns the function that runs it.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "cases/grammar.hpp"

namespace flashqla::cli {

// What the process returns.
enum Exit : int {
    kOk = 0,
    kCheckFailed = 1,
    kWrongInput = 2,   // options, cases, files, arguments the library refuses
    kUnsupported = 3,  // well formed, but no backend can do it
};

// Thrown inside the tool only, caught in main: one sentence and the exit code.
struct Failure {
    Exit code;
    std::string sentence;
};

using Command = std::function<Exit()>;
Command add_info(CLI::App& app);
Command add_plan(CLI::App& app);
Command add_run(CLI::App& app);
Command add_check(CLI::App& app);
Command add_bench(CLI::App& app);

// Cases on the command line and in tables, sweeps expanded.
struct CaseOptions {
    std::vector<std::string> lines, tables;
    std::string backend, device = "cpu";
    int threads = 0;
    void add_to(CLI::App& app);
    std::vector<cases::Case> read() const;  // throws Failure
    Device where() const;                   // the device; throws Failure when there is none such
};

Exit exit_code(Code code);
// The part of flashqla::system_info() behind "name: ", or "".
std::string system_value(const std::string& name);

}  // namespace flashqla::cli
