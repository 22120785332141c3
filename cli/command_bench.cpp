// Times cases. A case is checked against the oracle before it is timed, where the oracle can do it in reasonable time.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cases/device_copy.hpp"
#include "cases/device_memory.hpp"
#include "cases/runner.hpp"
#include "commands.hpp"
#include "terminal.hpp"

namespace flashqla::cli {
namespace {

using nlohmann::json;

struct BenchOptions : CaseOptions {
    double min_time = 0.3, check_limit = 3.0;
    int min_repeats = 5;
    bool no_check = false, keep_hot = false, one_call = false;
    std::string json_file, compare_file, commit = FQLA_COMMIT;
};

struct Timing {
    double median = 0, p10 = 0, p90 = 0;  // seconds
    std::size_t repeats = 0;
};

double tokens_of(const cases::Case& c) {
    if (!c.packed()) return static_cast<double>(c.batch) * static_cast<double>(c.tokens);
    double sum = 0;
    for (const std::int64_t n : c.lens) sum += static_cast<double>(n);
    return sum;
}

// Nominal work of the token recurrence, per token and value head, a multiply-add being two operations:
// S^T k, k d^T and S^T q are 2KV each, the decay KV: 7KV. Backward: the states once more (5KV), then seven products
// and the decay of dS (15KV): 20KV. A chunked kernel does other work for the same result; the nominal figure is what
// makes kernels comparable.
double nominal_flops(const cases::Case& c) {
    const double factor = c.pass == Pass::backward ? 20.0 : 7.0;
    return factor * tokens_of(c) * c.heads_v * static_cast<double>(c.dim_k) * c.dim_v;
}

// Bytes that have to move at least once: every tensor, of a pool only the slots in use.
double nominal_bytes(const cases::Case& c, const cases::Instance& instance) {
    double total = 0;
    for (const cases::HostTensor& tensor : instance.tensors) {
        double size = static_cast<double>(tensor.size()) * static_cast<double>(size_of(tensor.view.dtype));
        const bool pool = tensor.name == "state" || tensor.name == "final_state";
        const bool in_place = tensor.name == "state" || c.in_place || c.pool > 0;
        if (pool && c.pool > 0) size *= static_cast<double>(c.sequences()) / static_cast<double>(c.pool);
        total += pool && in_place ? 2 * size : size;
    }
    return total;
}

[[noreturn]] void fail(const Status& status) { throw Failure{exit_code(status.code()), status.message()}; }

Timing timing_of(std::vector<double> times) {
    std::sort(times.begin(), times.end());
    const auto quantile = [&](double p) {
        return times[static_cast<std::size_t>(std::lround(p * static_cast<double>(times.size() - 1)))];
    };
    return {quantile(0.5), quantile(0.1), quantile(0.9), times.size()};
}

// On a GPU: calls in a CUDA graph, one on each of so many copies of the tensors that none is still in the cache when
// its turn comes again, timed by the GPU. What the host does for a call is not in it. With one_call each graph holds a
// single call on the same tensors, with the GPU's clock read around each graph: how other libraries' figures are taken.
Timing time_on_gpu(const cases::Case& c, const Plan& plan, const BenchOptions& options, double& bytes) {
    constexpr std::int64_t kCache = std::int64_t{128} << 20, kMostMemory = std::int64_t{16} << 30;
    const cases::GpuTensors tensors(c);
    bytes = nominal_bytes(c, tensors.instance());
    const std::int64_t size = std::max<std::int64_t>(tensors.bytes(), 1);
    std::int64_t wanted = options.keep_hot || options.one_call ? 1 : std::clamp<std::int64_t>(kCache / size + 1, 1, 64);
    wanted = std::min(wanted, std::max<std::int64_t>(kMostMemory / size, 1));
    std::vector<cases::DeviceCopy> copies;
    while (static_cast<std::int64_t>(copies.size()) < wanted) {
        Result<cases::DeviceCopy> copy = tensors.copy();
        if (!copy.ok()) fail(copy.status());
        copies.push_back(std::move(copy).value());
    }
    const std::size_t scratch_bytes = plan.workspace_bytes(c.pass);
    Status status;
    const std::shared_ptr<std::byte> scratch = cases::allocate_on_gpu(c.device, scratch_bytes, status);
    if (!status.ok()) fail(status);
    const Workspace workspace{scratch_bytes > 0 ? scratch.get() : nullptr, scratch_bytes};

    const auto calls = options.one_call ? 1 : std::max<std::size_t>(copies.size(), 8);
    const Result<cases::Recording> recording = cases::Recording::make(c.device, [&](Stream stream) {
        Status submitted;
        for (std::size_t i = 0; i < calls && submitted.ok(); ++i)
            submitted = cases::submit(c, plan, copies[i % copies.size()].instance, workspace, stream);
        return submitted;
    });
    if (!recording.ok()) fail(recording.status());
    const auto seconds_of = [&](int times) {
        const Result<double> measured = recording->seconds(times);
        if (!measured.ok()) fail(measured.status());
        return measured.value();
    };
    double estimate = std::max(seconds_of(1), 1e-7);
    const double warm_up = std::min(0.05, options.min_time);
    estimate = std::max(seconds_of(std::clamp(static_cast<int>(warm_up / estimate), 1, 1000)), 1e-7);
    const int group = options.one_call ? 1 : std::clamp(static_cast<int>(1e-3 / estimate), 1, 1000);
    std::vector<double> times;
    double total = 0;
    while (times.size() < static_cast<std::size_t>(options.min_repeats) || total < options.min_time) {
        const double once = seconds_of(group);
        times.push_back(once / static_cast<double>(calls));
        total += once * group;
    }
    return timing_of(std::move(times));
}

Timing time_case(const cases::Case& c, const Plan& plan, const BenchOptions& options, double& bytes) {
    // Enough copies of the tensors that none is still in the second-level caches when its turn comes again; the last
    // level is too large and too shared to promise that.
    constexpr std::int64_t kCache = std::int64_t{32} << 20;
    constexpr std::int64_t kMostMemory = std::int64_t{1} << 30;
    std::vector<cases::Instance> copies;
    copies.push_back(cases::make_instance(c));
    bytes = nominal_bytes(c, copies.front());
    const std::int64_t size = std::max<std::int64_t>(copies.front().bytes(), 1);
    std::int64_t wanted = options.keep_hot ? 1 : std::clamp<std::int64_t>(kCache / size + 1, 1, 64);
    wanted = std::min(wanted, std::max<std::int64_t>(kMostMemory / size, 1));
    while (static_cast<std::int64_t>(copies.size()) < wanted) copies.push_back(cases::make_instance(c));
    const cases::Scratch scratch(plan.workspace_bytes(c.pass));
    std::size_t next = 0;
    const auto once = [&] {
        const Status status = cases::call(c, plan, copies[next++ % copies.size()], scratch.workspace());
        if (!status.ok()) fail(status);
    };
    double begin = seconds();
    once();
    const double estimate = std::max(seconds() - begin, 1e-7);
    // Short calls are timed in groups, so that the clock's own cost does not count.
    const auto group = static_cast<std::size_t>(std::clamp(20e-6 / estimate, 1.0, 1000.0));
    for (begin = seconds(); seconds() - begin < std::min(0.1, options.min_time / 4);) once();
    std::vector<double> times;
    double total = 0;
    while (times.size() < static_cast<std::size_t>(options.min_repeats) || total < options.min_time) {
        begin = seconds();
        for (std::size_t i = 0; i < group; ++i) once();
        const double elapsed = seconds() - begin;
        times.push_back(elapsed / static_cast<double>(group));
        total += elapsed;
        if (times.size() >= 100000) break;
    }
    return timing_of(std::move(times));
}

// Cases of an earlier --json file: ms by case line. The last line of a case counts.
struct Earlier {
    std::string name;
    std::map<std::string, double> ms;
};
Earlier read_earlier(const std::string& path) {
    Earlier earlier;
    if (path.empty()) return earlier;
    std::ifstream file(path);
    if (!file) throw Failure{kWrongInput, "bench: '" + path + "' cannot be opened; a file written by --json is needed"};
    int number = 0;
    for (std::string line; std::getline(file, line);) {
        ++number;
        if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
        const json row = json::parse(line, nullptr, false);
        if (!row.is_object() || !row.contains("case") || !row["case"].is_string() || !row.contains("ms") ||
            !row["ms"].is_number()) {
            throw Failure{kWrongInput, path + ":" + std::to_string(number) +
                                           ": not a result; a JSON object with case and ms is needed"};
        }
        earlier.ms[row["case"].get<std::string>()] = row["ms"].get<double>();
        earlier.name = row.value("commit", path);
    }
    return earlier;
}

std::string si(double x) {
    if (x >= 1e9) return format("%.2f G", x / 1e9);
    if (x >= 1e6) return format("%.2f M", x / 1e6);
    if (x >= 1e3) return format("%.2f k", x / 1e3);
    return format("%.0f ", x);
}

Exit bench(const BenchOptions& options) {
    std::vector<cases::Case> list = options.read();
    if (list.empty()) throw Failure{kWrongInput, "bench: no case was given; a CASE or --table FILE is needed"};
    const Earlier earlier = read_earlier(options.compare_file);
    std::ofstream lines;
    if (!options.json_file.empty()) {
        lines.open(options.json_file, std::ios::app);
        if (!lines) throw Failure{kWrongInput, "bench: '" + options.json_file + "' cannot be written"};
    }
    const std::string cpu = system_value("cpu");
    std::vector<std::vector<std::string>> rows = {
        {"case", "backend", "ms", "p10", "p90", "GFLOP/s", "GB/s", "token/s", "rel L2"}};
    if (!earlier.ms.empty()) rows[0].push_back("against " + earlier.name);
    bool wrong = false, unsupported = false;
    Progress progress("bench", list.size());
    for (std::size_t i = 0; i < list.size(); ++i) {
        const cases::Case& c = list[i];
        const std::string line = cases::to_line(c);
        progress.show(i, line);
        const Result<Plan> plan = cases::plan_of(c);
        if (!plan.ok()) {
            if (plan.status().code() != Code::unsupported) throw Failure{kWrongInput, plan.status().message()};
            progress.clear();
            std::fprintf(stderr, "flashqla: %s: %s\n", line.c_str(), plan.status().message().c_str());
            unsupported = true;
            continue;
        }
        // The oracle does about 1 GFLOP/s; a case that would take it longer is timed unchecked and says so.
        double rel_l2 = NAN;
        if (!options.no_check && nominal_flops(c) < options.check_limit * 1e9) {
            const cases::Report report = cases::check_case(c);
            rel_l2 = report.worst_rel_l2();
            if (report.verdict == cases::Verdict::failed) {
                wrong = true;
                progress.clear();
                std::fputs(cases::text_of(report, false).c_str(), stderr);
            }
        }
        double bytes = 0;
        const bool gpu = c.device.type == DeviceType::cuda;
        const Timing time =
            gpu ? time_on_gpu(c, plan.value(), options, bytes) : time_case(c, plan.value(), options, bytes);
        const double flops = nominal_flops(c), tokens = tokens_of(c);
        std::vector<std::string> row = {line,
                                        std::string(plan->backend(c.pass)),
                                        format("%.4f", 1e3 * time.median),
                                        format("%.4f", 1e3 * time.p10),
                                        format("%.4f", 1e3 * time.p90),
                                        format("%.1f", flops / time.median / 1e9),
                                        format("%.2f", bytes / time.median / 1e9),
                                        si(tokens / time.median),
                                        std::isnan(rel_l2) ? "unchecked" : format("%.1e", rel_l2)};
        json out = {{"commit", options.commit},
                    {"cpu", cpu},
                    {"case", line},
                    {"pass", c.pass == Pass::forward    ? "fwd"
                             : c.pass == Pass::backward ? "bwd"
                                                        : "dec"},
                    {"backend", plan->backend(c.pass)},
                    {"ms", 1e3 * time.median},
                    {"ms_p10", 1e3 * time.p10},
                    {"ms_p90", 1e3 * time.p90},
                    {"repeats", time.repeats},
                    {"gflops", flops / time.median / 1e9},
                    {"bytes", bytes},
                    {"gb_per_s", bytes / time.median / 1e9},
                    {"tokens_per_s", tokens / time.median},
                    {"workspace_bytes", plan->workspace_bytes(c.pass)},
                    {"threads", c.threads},
                    {"date", date_today()}};
        if (gpu) out["gpu"] = system_value("gpus");
        const std::string targets = system_value("backend cpu");
        if (plan->backend(c.pass) == "cpu" && !targets.empty()) out["cpu_backend"] = targets;
        out["rel_l2"] = std::isnan(rel_l2) ? json() : json(rel_l2);
        const auto before = earlier.ms.find(line);
        if (!earlier.ms.empty()) {
            row.push_back(before == earlier.ms.end() ? "-" : format("%.3fx", before->second / (1e3 * time.median)));
        }
        if (before != earlier.ms.end()) {
            out["peer"] = earlier.name;
            out["peer_ms"] = before->second;
            out["ratio"] = before->second / (1e3 * time.median);
        }
        if (lines.is_open()) lines << out.dump() << "\n" << std::flush;
        rows.push_back(std::move(row));
    }
    progress.clear();
    std::fputs(table(rows).c_str(), stdout);
    if (options.where().type == DeviceType::cuda) std::printf("gpus: %s\n", system_value("gpus").c_str());
    std::printf(
        "cpu: %s; commit %s; median of at least %d runs; GFLOP/s is nominal: 7KV a token and head, backward 20KV\n",
        cpu.c_str(), options.commit.c_str(), options.min_repeats);
    return wrong ? kCheckFailed : unsupported ? kUnsupported : kOk;
}

}  // namespace

Command add_bench(CLI::App& app) {
    auto options = std::make_shared<BenchOptions>();
    options->add_to(app);
    app.add_option("--json", options->json_file, "Append one JSON object a case")->type_name("FILE");
    app.add_option("--compare", options->compare_file, "An earlier --json file to compare with")->type_name("FILE");
    app.add_option("--min-time", options->min_time, "Seconds to measure each case at least")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    app.add_option("--min-repeats", options->min_repeats, "Runs at least")
        ->check(CLI::Range(5, 1000000))
        ->capture_default_str();
    app.add_option("--check-limit", options->check_limit, "Check cases of up to this many nominal GFLOP")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    app.add_flag("--no-check", options->no_check, "Do not compare with the oracle first");
    app.add_flag("--hot", options->keep_hot, "One set of buffers, in cache; default: rotate past the caches");
    app.add_flag("--one-call", options->one_call,
                 "GPU: one call a CUDA graph, on one set of buffers; default: 8 calls or more");
    app.add_option("--commit", options->commit, "Commit to write down")->capture_default_str();
    return [options] { return bench(*options); };
}

}  // namespace flashqla::cli
