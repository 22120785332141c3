// peer_bench: times FlashQLA's CPU backend beside other implementations of the gated delta rule, in one process, on the
// same inputs.
//
// Machines are rarely quiet, so contenders take turns: every round times a block of calls of each, in rotating order,
// and a ratio is the median over rounds of the ratio within a round. What disturbs a round disturbs both sides of it.
// A contender whose result differs from the recurrence in double precision is reported and not timed.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "flashqla_runs.hpp"
#include "peer_gdn.hpp"

namespace flashqla::bench {
namespace {

constexpr const char* kUsage =
    R"(usage: peer_bench [options]
  --ggml FILE        ggml as a shared library (libggml.so, its CPU backend beside it)
  --ik FILE          a shared object that exports iqk_fused_delta_net
  --threads LIST     thread counts                                  [1,2]
  --tokens LIST      lengths of the prefill and backward cases      [512,2048]
  --cases LIST       of prefill, decode, backward                   [prefill,decode,backward]
  --heads HK,HV      key heads, value heads                         [16,32]
  --states N         states the rotating decode case walks through  [64]
  --repeat N         rounds                                         [15]
  --block-ms X       least time of one contender's block in a round [5]
  --budget-s X       time after which a case stops at 3 rounds or more [60]
  --commit TEXT      goes into the records as it is
  --out FILE         append JSON lines here
)";

struct Options {
    std::string ggml, ik, out, commit = "unknown";
    std::vector<std::int64_t> threads{1, 2}, tokens{512, 2048}, heads{16, 32};
    std::vector<std::string> cases{"prefill", "decode", "backward"};
    std::int64_t states = 64;
    int repeat = 15;
    double block_ms = 5.0, budget_s = 60.0;

    bool wants(const std::string& name) const { return std::find(cases.begin(), cases.end(), name) != cases.end(); }
};

std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
    return parts;
}

std::vector<std::int64_t> split_numbers(const std::string& text) {
    std::vector<std::int64_t> numbers;
    for (const std::string& part : split(text)) {
        numbers.push_back(std::stoll(part));
        if (numbers.back() < 1) throw std::invalid_argument("numbers must be positive, found " + part);
    }
    return numbers;
}

Options parse(int argc, char** argv) {
    Options options;
    const std::map<std::string, std::function<void(const std::string&)>> actions{
        {"--ggml", [&](const std::string& x) { options.ggml = x; }},
        {"--ik", [&](const std::string& x) { options.ik = x; }},
        {"--threads", [&](const std::string& x) { options.threads = split_numbers(x); }},
        {"--tokens", [&](const std::string& x) { options.tokens = split_numbers(x); }},
        {"--cases", [&](const std::string& x) { options.cases = split(x); }},
        {"--heads", [&](const std::string& x) { options.heads = split_numbers(x); }},
        {"--states", [&](const std::string& x) { options.states = split_numbers(x).at(0); }},
        {"--repeat", [&](const std::string& x) { options.repeat = static_cast<int>(split_numbers(x).at(0)); }},
        {"--block-ms", [&](const std::string& x) { options.block_ms = std::stod(x); }},
        {"--budget-s", [&](const std::string& x) { options.budget_s = std::stod(x); }},
        {"--commit", [&](const std::string& x) { options.commit = x; }},
        {"--out", [&](const std::string& x) { options.out = x; }},
    };
    for (int i = 1; i < argc; i += 2) {
        const auto action = actions.find(argv[i]);
        if (action == actions.end() || i + 1 == argc) {
            throw std::invalid_argument("unknown or incomplete option: " + std::string(argv[i]));
        }
        action->second(argv[i + 1]);
    }
    if (options.heads.size() != 2 || options.heads[1] % options.heads[0] != 0) {
        throw std::invalid_argument("--heads takes HK,HV with HV a multiple of HK");
    }
    return options;
}

// ---------------------------------------------------------------------------------------------------- inputs

struct Shape {
    std::int64_t T, heads_k, heads_v, dim, states;
};

// Inputs as a model would make them, already rounded to the dtypes of `precision`, and the right answer for them.
class Data {
public:
    Data(const Shape& shape, Precision precision) : shape_(shape) {
        std::mt19937 random(20240917);  // the same numbers for every precision: only their rounding differs
        std::normal_distribution<float> normal;
        std::uniform_real_distribution<float> uniform;
        const auto draw = [&](std::int64_t count, auto&& next) {
            std::vector<float> values(static_cast<std::size_t>(count));
            std::generate(values.begin(), values.end(), next);
            return values;
        };
        q_ = draw(shape.T * shape.heads_k * shape.dim, [&] { return normal(random); });
        k_ = draw(shape.T * shape.heads_k * shape.dim, [&] { return normal(random); });
        v_ = draw(shape.T * shape.heads_v * shape.dim, [&] { return normal(random); });
        g_ = draw(shape.T * shape.heads_v, [&] { return -0.1f * uniform(random); });
        // One peer takes beta as a logit: keep clear of the ends, where a float logit would lose digits.
        beta_ = draw(shape.T * shape.heads_v, [&] { return 0.01f + 0.98f * uniform(random); });
        state_ = draw(shape.states * shape.heads_v * shape.dim * shape.dim, [&] { return 0.1f * normal(random); });
        d_o_ = draw(shape.T * shape.heads_v * shape.dim, [&] { return normal(random); });
        normalise(q_);
        normalise(k_);
        for (auto* values : {&q_, &k_, &v_, &d_o_}) round_to(*values, precision.io);
        round_to(state_, precision.state);
    }

    PeerCase problem(int threads) {
        o_.resize(v_.size());
        final_state_.resize(static_cast<std::size_t>(shape_.heads_v * shape_.dim * shape_.dim));
        return {shape_.T,      shape_.heads_k, shape_.heads_v,      shape_.dim,   threads,
                q_.data(),     k_.data(),      v_.data(),           g_.data(),    beta_.data(),
                state_.data(), o_.data(),      final_state_.data(), shape_.states};
    }

    void solve(int threads) {
        right_o_.resize(v_.size());
        right_state_.resize(static_cast<std::size_t>(shape_.heads_v * shape_.dim * shape_.dim));
        reference_recurrence(problem(threads), right_o_.data(), right_state_.data());
    }

    const float* d_o() const { return d_o_.data(); }
    double error_of_o() const { return relative_l2(o_, right_o_); }
    double error_of_state() const { return relative_l2(final_state_, right_state_); }

    template <class A, class B>
    static double relative_l2(const A& found, const B& right) {
        double difference = 0.0, norm = 0.0;
        for (std::size_t i = 0; i < right.size(); ++i) {
            const double x = found[i], y = right[i];
            difference += (x - y) * (x - y);
            norm += y * y;
        }
        return std::sqrt(difference / norm);
    }

private:
    void normalise(std::vector<float>& values) const {
        for (auto row = values.begin(); row != values.end(); row += shape_.dim) {
            double sum = 1e-6;
            for (auto x = row; x != row + shape_.dim; ++x) sum += static_cast<double>(*x) * *x;
            for (auto x = row; x != row + shape_.dim; ++x) *x = static_cast<float>(*x / std::sqrt(sum));
        }
    }

    static void round_to(std::vector<float>& values, DType dtype) {
        for (float& x : values) x = rounded(x, dtype);
    }

    Shape shape_;
    std::vector<float> q_, k_, v_, g_, beta_, state_, d_o_, o_, final_state_;
    std::vector<double> right_o_, right_state_;
};

// ---------------------------------------------------------------------------------------------------- timing

struct Contender {
    std::string impl, backend;
    std::function<void(std::int64_t)> call;  // argument: number of the call within a block
    double rel_l2 = 0.0, rel_l2_state = 0.0;
    std::int64_t calls = 1;  // of a block
    std::vector<double> us;  // per token, one a round
};

double now_us() {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

// Rounds of blocks. `calls_multiple`: a block has a multiple of so many calls (a full walk through the states).
void take_turns(std::vector<Contender>& contenders, std::int64_t tokens, std::int64_t calls_multiple,
                const Options& options) {
    for (Contender& c : contenders) {
        c.call(0);
        const double start = now_us();
        c.call(0);
        const double once = std::max(now_us() - start, 0.1);
        const double units = options.block_ms * 1e3 / (once * static_cast<double>(calls_multiple));
        c.calls = calls_multiple * std::max<std::int64_t>(1, std::llround(units));
    }
    const double begin = now_us();
    for (int round = 0; round < options.repeat; ++round) {
        if (round >= 3 && now_us() - begin > options.budget_s * 1e6) break;
        for (std::size_t i = 0; i < contenders.size(); ++i) {
            Contender& c = contenders[(i + static_cast<std::size_t>(round)) % contenders.size()];
            if (c.calls > 1) c.call(0);  // fetches its code and small tensors; a long call needs no such help
            const double start = now_us();
            for (std::int64_t n = 0; n < c.calls; ++n) c.call(n);
            c.us.push_back((now_us() - start) / static_cast<double>(c.calls * tokens));
        }
    }
}

// ---------------------------------------------------------------------------------------------------- report

// The kernel's name for the processor; a virtual machine's is often vague, so family and model go with it.
std::string cpu_name() {
    std::map<std::string, std::string> fields;
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line) && !line.empty();) {
        const std::size_t colon = line.find(':'), value = line.find_first_not_of(" \t", colon + 1);
        if (colon == std::string::npos || value == std::string::npos) continue;
        fields[line.substr(0, line.find_last_not_of(" \t", colon - 1) + 1)] = line.substr(value);
    }
    if (fields["model name"].empty()) return "unknown";
    return fields["model name"] + " (family " + fields["cpu family"] + " model " + fields["model"] + ")";
}

std::string quoted(const std::string& text) {
    std::string result = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') result += '\\';
        if (static_cast<unsigned char>(c) >= 0x20) result += c;
    }
    return result + '"';
}

std::string number(const char* format, double value) {
    if (!std::isfinite(value)) return "null";
    char text[64];
    std::snprintf(text, sizeof text, format, value);
    return text;
}

class Report {
public:
    explicit Report(const Options& options) : commit_(options.commit), cpu_(cpu_name()) {
        if (!options.out.empty()) {
            file_.open(options.out, std::ios::app);
            if (!file_) throw std::runtime_error("cannot write to " + options.out);
        }
        char date[32];
        const std::time_t now = std::time(nullptr);
        std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&now));
        date_ = date;
        double load = 0.0;
        if (getloadavg(&load, 1) == 1) std::printf("load average at the start: %.2f\n", load);
        std::printf("cpu: %s\n\n%-19s %3s  %-26s %-10s %9s %9s %9s %9s %8s %8s %8s\n", cpu_.c_str(), "case", "thr",
                    "impl", "backend", "best us/t", "median", "rel_l2 o", "state", "x ggml", "x ik", "x fwd");
    }

    // Ratios are the other's time over this one's: above 1 means this one is faster. `x fwd` is this one's time over
    // the forward pass of the same precision.
    void print(const std::string& name, std::int64_t threads, const std::vector<Contender>& contenders) {
        for (const Contender& c : contenders) {
            const double best = *std::min_element(c.us.begin(), c.us.end()), middle = median(c.us);
            const double ggml = ratio(find(contenders, "ggml"), c), ik = ratio(find(contenders, "ik_llama"), c);
            const double forward = 1.0 / ratio(find(contenders, forward_of(c.impl)), c);
            std::printf("%-19s %3lld  %-26s %-10s %9.2f %9.2f %9.1e %9s %8s %8s %8s\n", name.c_str(),
                        static_cast<long long>(threads), c.impl.c_str(), c.backend.c_str(), best, middle, c.rel_l2,
                        cell("%.1e", c.rel_l2_state).c_str(), cell("%.2f", ggml).c_str(), cell("%.2f", ik).c_str(),
                        cell("%.2f", forward).c_str());
            if (file_) {
                file_ << "{\"commit\":" << quoted(commit_) << ",\"cpu\":" << quoted(cpu_)
                      << ",\"date\":" << quoted(date_) << ",\"case\":" << quoted(name) << ",\"threads\":" << threads
                      << ",\"impl\":" << quoted(c.impl) << ",\"backend\":" << quoted(c.backend)
                      << ",\"rounds\":" << c.us.size() << ",\"median_us_per_token\":" << number("%.4g", middle)
                      << ",\"best_us_per_token\":" << number("%.4g", best) << ",\"rel_l2\":" << number("%.3g", c.rel_l2)
                      << ",\"rel_l2_state\":" << number("%.3g", c.rel_l2_state)
                      << ",\"ratio_vs_ggml\":" << number("%.4g", ggml)
                      << ",\"ratio_vs_ik_llama\":" << number("%.4g", ik)
                      << ",\"ratio_vs_forward\":" << number("%.4g", forward) << "}" << std::endl;
            }
        }
        std::fflush(stdout);
    }

private:
    static std::string cell(const char* format, double value) {
        return std::isfinite(value) ? number(format, value) : "-";
    }

    static const Contender* find(const std::vector<Contender>& contenders, const std::string& impl) {
        const auto found = std::find_if(contenders.begin(), contenders.end(), [&](auto& c) { return c.impl == impl; });
        return found == contenders.end() ? nullptr : &*found;
    }

    static std::string forward_of(const std::string& impl) {
        constexpr std::string_view kBackward = "_backward";
        return impl.ends_with(kBackward) ? impl.substr(0, impl.size() - kBackward.size()) + "_forward" : "";
    }

    static double ratio(const Contender* other, const Contender& c) {
        if (other == nullptr || other == &c) return std::nan("");
        std::vector<double> ratios;
        for (std::size_t i = 0; i < c.us.size(); ++i) ratios.push_back(other->us[i] / c.us[i]);
        return median(ratios);
    }

    std::string commit_, cpu_, date_;
    std::ofstream file_;
};

// ----------------------------------------------------------------------------------------------------- cases

struct OwnVariant {
    const char* impl;
    Precision precision;
};

class Bench {
public:
    explicit Bench(Options options) : options_(std::move(options)), report_(options_) {
        if (!options_.ggml.empty()) peers_.push_back(load_ggml(options_.ggml));
        if (!options_.ik.empty()) peers_.push_back(load_ik_llama(options_.ik));
    }

    bool run() {
        for (const std::int64_t threads : options_.threads) {
            if (options_.wants("prefill")) {
                for (const std::int64_t T : options_.tokens) prefill(T, static_cast<int>(threads));
            }
            if (options_.wants("decode")) {
                decode("decode_same_state", 1, static_cast<int>(threads));
                decode("decode_" + std::to_string(options_.states) + "_states", options_.states,
                       static_cast<int>(threads));
            }
            if (options_.wants("backward")) {
                for (const std::int64_t T : options_.tokens) backward(T, static_cast<int>(threads));
            }
        }
        return all_right_;
    }

private:
    static constexpr std::int64_t kDim = 128;

    Shape shape(std::int64_t T, std::int64_t states) const {
        return {T, options_.heads[0], options_.heads[1], kDim, states};
    }

    // Largest relative L2 error a contender may have. Rounding a result to bf16 alone costs about 1.7e-3.
    static double tolerance(Precision p) { return p.io == DType::f32 && p.state == DType::f32 ? 1e-5 : 1e-2; }

    void complain(const std::string& name, const std::string& impl, const std::string& what) {
        std::printf("%-19s      %-26s not timed: %s\n", name.c_str(), impl.c_str(), what.c_str());
        all_right_ = false;
    }

    // Checks `run` against the solved `data` and, when right, lets it take part.
    void enter(std::vector<Contender>& contenders, const std::string& name, const std::string& impl,
               const std::string& backend, std::shared_ptr<PeerRun> run, const Data& data, double limit,
               std::int64_t states) {
        run->fetch();
        Contender c;
        c.impl = impl;
        c.backend = backend;
        c.rel_l2 = data.error_of_o();
        c.rel_l2_state = data.error_of_state();
        if (!(c.rel_l2 <= limit && c.rel_l2_state <= limit)) {  // NaN is wrong too
            return complain(name, impl,
                            "relative L2 error " + number("%.2e", c.rel_l2) + " (state " +
                                number("%.2e", c.rel_l2_state) + "), allowed " + number("%.0e", limit));
        }
        c.call = [run = std::move(run), states](std::int64_t n) { run->run(n % states); };
        contenders.push_back(std::move(c));
    }

    using Prepare = std::function<std::unique_ptr<PeerRun>(const PeerCase&, Precision)>;

    void race(const std::string& name, const Shape& size, int threads, Pass pass, StateUpdate update,
              const std::vector<OwnVariant>& variants, const Prepare& prepare) {
        std::vector<Contender> contenders;
        Data exact(size, Precision{});
        exact.solve(threads);
        const PeerCase problem = exact.problem(threads);
        for (const auto& peer : peers_) {
            const StateUpdate possible = peer->supports(update) ? update : StateUpdate::to_output;
            enter(contenders, name, peer->name(), "", peer->prepare(problem, possible), exact, tolerance({}),
                  size.states);
        }
        std::vector<std::unique_ptr<Data>> kept;  // contenders hold pointers into their data
        for (const OwnVariant& variant : variants) {
            kept.push_back(std::make_unique<Data>(size, variant.precision));
            Data& data = *kept.back();
            data.solve(threads);
            const PeerCase own = data.problem(threads);
            try {
                enter(contenders, name, variant.impl, serving_backend(own, variant.precision, pass),
                      prepare(own, variant.precision), data, tolerance(variant.precision), size.states);
            } catch (const std::exception& error) {
                complain(name, variant.impl, error.what());
            }
        }
        take_turns(contenders, size.T, size.states, options_);
        report_.print(name, threads, contenders);
    }

    void prefill(std::int64_t T, int threads) {
        race("prefill_T" + std::to_string(T), shape(T, 1), threads, Pass::forward, StateUpdate::to_output,
             {{"flashqla_f32", {DType::f32, DType::f32}}, {"flashqla_bf16", {DType::bf16, DType::f32}}},
             prepare_forward);
    }

    void decode(const std::string& name, std::int64_t states, int threads) {
        race(name, shape(1, states), threads, Pass::decode, StateUpdate::in_place,
             {{"flashqla_f32", {DType::f32, DType::f32}},
              {"flashqla_bf16_state_f32", {DType::bf16, DType::f32}},
              {"flashqla_bf16_state_bf16", {DType::bf16, DType::bf16}}},
             prepare_decode);
    }

    // No peer has a backward pass on the CPU: the figure of merit is its time over the forward pass.
    void backward(std::int64_t T, int threads) {
        const std::string name = "backward_T" + std::to_string(T);
        std::vector<Contender> contenders;
        std::vector<std::unique_ptr<Data>> kept;
        for (const OwnVariant& variant :
             {OwnVariant{"flashqla_f32", {DType::f32, DType::f32}}, {"flashqla_bf16", {DType::bf16, DType::f32}}}) {
            try {
                const double error = gradient_error(std::min(T, kCheckedTokens), variant.precision, threads);
                // Gradients pass through more roundings than outputs do, and d_g is a difference of large sums.
                const double limit = variant.precision.io == DType::f32 ? 1e-4 : 3e-2;
                if (!(error <= limit)) {
                    complain(name, variant.impl, "a gradient's relative L2 error is " + number("%.2e", error));
                    continue;
                }
                kept.push_back(std::make_unique<Data>(shape(T, 1), variant.precision));
                const PeerCase problem = kept.back()->problem(threads);
                std::shared_ptr<TrainingStep> step =
                    prepare_training(problem, variant.precision, kept.back()->d_o(), "");
                Contender c;
                c.rel_l2 = error;
                c.rel_l2_state = std::nan("");
                c.impl = std::string(variant.impl) + "_forward";
                c.backend = serving_backend(problem, variant.precision, Pass::forward);
                c.call = [step](std::int64_t) { step->forward(); };
                contenders.push_back(c);
                c.impl = std::string(variant.impl) + "_backward";
                c.backend = serving_backend(problem, variant.precision, Pass::backward);
                c.call = [step](std::int64_t) { step->backward(); };
                contenders.push_back(c);
            } catch (const std::exception& error) {
                complain(name, variant.impl, error.what());
            }
        }
        take_turns(contenders, T, 1, options_);
        report_.print(name, threads, contenders);
    }

    // Worst gradient against the library's oracle (the last of the candidate list) in fp32 on the same rounded inputs;
    // short, because the oracle takes its time.
    double gradient_error(std::int64_t T, Precision precision, int threads) const {
        const std::string names = backend_names();
        std::string oracle = names.substr(names.rfind(',') == std::string::npos ? 0 : names.rfind(',') + 1);
        oracle.erase(0, oracle.find_first_not_of(' '));
        Data data(shape(T, 1), precision);
        const PeerCase problem = data.problem(threads);
        const auto own = prepare_training(problem, precision, data.d_o(), "");
        const auto right = prepare_training(problem, Precision{}, data.d_o(), oracle);
        own->backward();
        right->backward();
        const auto found = own->gradients(), wanted = right->gradients();
        double worst = 0.0;
        for (std::size_t i = 0; i < wanted.size(); ++i) {
            const double error = Data::relative_l2(found[i], wanted[i]);
            if (!(error <= worst)) worst = error;
        }
        return worst;
    }

    static constexpr std::int64_t kCheckedTokens = 200;  // not a multiple of the chunk

    Options options_;
    Report report_;
    std::vector<std::unique_ptr<Peer>> peers_;
    bool all_right_ = true;
};

}  // namespace
}  // namespace flashqla::bench

int main(int argc, char** argv) {
    if (argc == 2 && std::string_view(argv[1]) == "--help") {
        std::cout << flashqla::bench::kUsage;
        return 0;
    }
    try {
        flashqla::bench::Options options;
        try {
            options = flashqla::bench::parse(argc, argv);
        } catch (const std::exception& error) {
            std::cerr << error.what() << "\n" << flashqla::bench::kUsage;
            return 2;
        }
        return flashqla::bench::Bench(std::move(options)).run() ? 0 : 1;
    } catch (const std::exception& error) {
        std::cerr << error.what() << "\n";
        return 1;
    }
}
