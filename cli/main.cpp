// The flashqla command line tool: info, plan, run, check, bench.

#include <cstdio>
#include <exception>

#include "cases/device_memory.hpp"
#include "cases/items.hpp"
#include "commands.hpp"

namespace flashqla::cli {

void CaseOptions::add_to(CLI::App& app) {
    app.add_option("cases", lines,
                   "Cases such as 'fwd:b1,t512,hk2,hv4,bf16,gate=log'; `flashqla --help` has the grammar")
        ->type_name("CASE");
    app.add_option("--table", tables, "File with one case a line; may be given several times")->type_name("FILE");
    app.add_option("--backend", backend, "Backend for cases that name none")->type_name("NAME");
    app.add_option("--device", device, "Where the cases run: cpu, cuda, or cuda:1 and so on")
        ->type_name("DEVICE")
        ->capture_default_str();
    app.add_option("--threads", threads, "Threads for cases that give no number")
        ->check(CLI::Range(1, 4096))
        ->type_name("N");
}

Device CaseOptions::where() const {
    Device chosen;
    std::string_view text = device;
    if (text.substr(0, 4) == "cuda") {
        chosen.type = DeviceType::cuda;
        text.remove_prefix(4);
    } else if (text.substr(0, 3) == "cpu") {
        text.remove_prefix(3);
    } else {
        throw Failure{kWrongInput, "--device is '" + device + "'; cpu, cuda or cuda:N is needed"};
    }
    std::int64_t index = 0;
    const bool numbered = !text.empty() && text.front() == ':';
    if (numbered) text.remove_prefix(1);
    if (numbered ? !cases::read_number(text, index) || index < 0 || index > 1023 : !text.empty()) {
        throw Failure{kWrongInput, "--device is '" + device + "'; cpu, cuda or cuda:N is needed"};
    }
    chosen.index = static_cast<std::int32_t>(index);
    const std::string problem = cases::device_problem(chosen);
    if (!problem.empty()) throw Failure{kUnsupported, "--device " + device + ": " + problem};
    return chosen;
}

std::vector<cases::Case> CaseOptions::read() const {
    const Device on = where();
    std::vector<std::string> all;
    for (const std::string& line : lines) {
        const cases::Parsed<std::vector<std::string>> expanded = cases::expand(line);
        if (!expanded.ok()) throw Failure{kWrongInput, expanded.error};
        all.insert(all.end(), expanded.value.begin(), expanded.value.end());
    }
    std::vector<cases::Case> parsed;
    const auto add = [&](const std::string& line, const std::string& where) {
        cases::Parsed<cases::Case> c = cases::parse_case(line);
        if (!c.ok()) throw Failure{kWrongInput, where + c.error + " (in '" + line + "')"};
        if (c.value.backend.empty()) c.value.backend = backend;
        if (c.value.threads == 0) c.value.threads = threads;
        c.value.device = on;
        parsed.push_back(std::move(c.value));
    };
    for (const std::string& line : all) add(line, "");
    for (const std::string& path : tables) {
        const cases::Parsed<std::vector<cases::TableLine>> rows = cases::read_table(path);
        if (!rows.ok()) throw Failure{kWrongInput, rows.error};
        for (const cases::TableLine& row : rows.value) add(row.text, path + ":" + std::to_string(row.number) + ": ");
    }
    return parsed;
}

Exit exit_code(Code code) {
    switch (code) {
        case Code::ok: return kOk;
        case Code::unsupported: return kUnsupported;
        case Code::invalid_argument: return kWrongInput;
        default: return kCheckFailed;
    }
}

std::string system_value(const std::string& name) {
    const std::string text = system_info(), key = name + ": ";
    for (std::size_t begin = 0; begin < text.size();) {
        const std::size_t end = std::min(text.find('\n', begin), text.size());
        if (text.compare(begin, key.size(), key) == 0) return text.substr(begin + key.size(), end - begin - key.size());
        begin = end + 1;
    }
    return "";
}

namespace {

int run(int argc, char** argv) {
    CLI::App app("FlashQLA: Gated Delta Net linear attention.", "flashqla");
    app.set_version_flag("--version", std::string("flashqla ") + version());
    app.require_subcommand(1);
    app.footer(cases::grammar_help() +
               "Exit codes: 0 good, 1 a check failed, 2 wrong input, 3 no backend supports it.");
    struct Row {
        CLI::App* app;
        Command command;
    };
    std::vector<Row> rows;
    const auto add = [&](const char* name, const char* help, Command (*make)(CLI::App&)) {
        CLI::App* sub = app.add_subcommand(name, help);
        rows.push_back({sub, make(*sub)});
    };
    add("info", "Build, backends, processor features, GPUs", add_info);
    add("plan", "What the library decides about a case, and the memory it needs", add_plan);
    add("run", "Compute tensors of a safetensors file", add_run);
    add("check", "Compare cases with the double-precision oracle, head by head", add_check);
    add("bench", "Time cases", add_bench);
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
        if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
        std::fprintf(stderr, "flashqla: %s; `flashqla --help` lists the commands and options\n", error.what());
        return kWrongInput;
    }
    for (const Row& row : rows) {
        if (row.app->parsed()) return row.command();
    }
    return kWrongInput;
}

}  // namespace
}  // namespace flashqla::cli

int main(int argc, char** argv) {
    using namespace flashqla::cli;
    try {
        return run(argc, argv);
    } catch (const Failure& failure) {
        std::fprintf(stderr, "flashqla: %s\n", failure.sentence.c_str());
        return failure.code;
    } catch (const std::bad_alloc&) {
        std::fprintf(stderr, "flashqla: there is not enough memory for this\n");
        return kWrongInput;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "flashqla: %s\n", error.what());
        return kWrongInput;
    }
}
