#include "check.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "generate.hpp"
#include "network.hpp"
#include "safetensors/safetensors.hpp"

namespace qwen3_next {
namespace {

using flashqla::DType;
using flashqla::TensorView;
using flashqla::safetensors::Entry;

class References {
public:
    explicit References(const std::string& path) : path_(path), file_(flashqla::safetensors::read(path)) {
        if (!file_.content.ok()) throw std::runtime_error(file_.content.error);
    }

    const Entry& find(const std::string& name, DType dtype, std::size_t rank) const {
        const Entry* entry = file_.content.find(name);
        if (!entry || entry->dtype != dtype || entry->shape.size() != rank) {
            throw std::runtime_error(path_ + " has no tensor " + name + " of type " + flashqla::name_of(dtype) +
                                     " and rank " + std::to_string(rank));
        }
        return *entry;
    }

    template <class T>
    std::vector<T> values(const Entry& entry) const {
        std::vector<T> result(static_cast<std::size_t>(entry.elements()));
        std::memcpy(result.data(), entry.bytes.data(), result.size() * sizeof(T));
        return result;
    }

    std::string text(const std::string& name) const {
        std::string result;
        for (const std::int32_t id : values<std::int32_t>(find(name, DType::i32, 1))) result += static_cast<char>(id);
        return result;
    }

private:
    std::string path_;
    flashqla::safetensors::File file_;
};

// bf16 -> f32 is exact. The view is into `values`.
TensorView widened(const Entry& entry, std::vector<float>& values) {
    values.resize(static_cast<std::size_t>(entry.elements()));
    for (std::size_t i = 0; i < values.size(); ++i) {
        std::uint16_t bits;
        std::memcpy(&bits, entry.bytes.data() + 2 * i, 2);
        values[i] = std::bit_cast<float>(std::uint32_t{bits} << 16);
    }
    return flashqla::tensor(values.data(), DType::f32,
                            {entry.shape[0], entry.shape[1], entry.shape[2], entry.shape[3]});
}

// Per head, since one small head disappears in the norm of all of them. Both are [outer, heads, inner].
std::vector<double> errors_by_head(std::span<const float> found, std::span<const float> expected, std::size_t outer,
                                   std::size_t heads) {
    const std::size_t inner = found.size() / (outer * heads);
    std::vector<double> errors;
    for (std::size_t h = 0; h < heads; ++h) {
        std::vector<float> a, b;
        for (std::size_t t = 0; t < outer; ++t) {
            const auto at = static_cast<std::ptrdiff_t>((t * heads + h) * inner);
            const auto end = at + static_cast<std::ptrdiff_t>(inner);
            a.insert(a.end(), found.begin() + at, found.begin() + end);
            b.insert(b.end(), expected.begin() + at, expected.begin() + end);
        }
        errors.push_back(relative_l2(a, b));
    }
    return errors;
}

// Prints figures beside their limits and remembers whether one was too large.
class Table {
public:
    void title(const char* text) { std::printf("%s\n", text); }

    void error(const std::string& what, double found, double limit) {
        line(what, found <= limit);
        std::printf("relative L2 %.1e, at most %.0e\n", found, limit);
    }
    void count(const std::string& what, std::int64_t found, std::int64_t all) {
        line(what, found == all);
        std::printf("%lld of %lld\n", static_cast<long long>(found), static_cast<long long>(all));
    }
    bool good() const { return good_; }

private:
    void line(const std::string& what, bool good) {
        std::printf("  %-5s  %-52s  ", good ? "ok" : "WRONG", what.c_str());
        good_ &= good;
    }
    bool good_ = true;
};

}  // namespace

double relative_l2(std::span<const float> found, std::span<const float> expected) {
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
        const double difference = static_cast<double>(found[i]) - expected[i];
        error += difference * difference;
        norm += static_cast<double>(expected[i]) * expected[i];
    }
    return std::sqrt(error / norm);
}

std::int64_t agreeing_argmax(std::span<const float> a, std::span<const float> b, std::size_t width) {
    std::int64_t count = 0;
    for (std::size_t at = 0; at < a.size(); at += width) {
        const auto best = [&](std::span<const float> all) {
            const auto row = all.subspan(at, width);
            return std::ranges::max_element(row) - row.begin();
        };
        count += best(a) == best(b);
    }
    return count;
}

Reference load_reference(const std::string& directory) {
    const References file(directory + "/reference.safetensors");
    Reference reference;
    reference.input = file.text("input_ids");
    reference.logits = file.values<float>(file.find("logits", DType::f32, 2));
    reference.prompt = file.text("prompt_ids");
    reference.continuation = file.text("greedy_ids");
    if (reference.logits.size() != reference.input.size() * 256) {
        throw std::runtime_error(directory + "/reference.safetensors: logits are not [input_ids, 256]");
    }
    return reference;
}

RuleCheck check_rule(const std::string& directory, const std::string& backend, DType io) {
    const References file(directory + "/layer_inputs.safetensors");
    const Entry& q = file.find("q", DType::bf16, 4);
    const Entry& k = file.find("k", DType::bf16, 4);
    const Entry& v = file.find("v", DType::bf16, 4);

    flashqla::Problem problem;
    problem.batch = q.shape[0];
    problem.tokens = q.shape[1];
    problem.heads_k = static_cast<std::int32_t>(q.shape[2]);
    problem.heads_v = static_cast<std::int32_t>(v.shape[2]);
    problem.dim_k = static_cast<std::int32_t>(q.shape[3]);
    problem.dim_v = static_cast<std::int32_t>(v.shape[3]);
    problem.io = io;
    problem.out = DType::f32;
    problem.gate = flashqla::Gate::raw;
    problem.beta_mode = flashqla::BetaMode::logit;
    problem.qk_l2norm = true;
    const flashqla::Plan plan = flashqla::check(flashqla::Plan::create(problem, {}, {.backend = backend}));

    const Entry& o_ref = file.find("o_ref", DType::f32, 4);
    const Entry& state_ref = file.find("state_ref", DType::f32, 4);
    RuleCheck result;
    result.o.resize(static_cast<std::size_t>(o_ref.elements()));
    result.state.resize(static_cast<std::size_t>(state_ref.elements()));

    flashqla::ForwardArgs args;
    std::vector<float> wide_q, wide_k, wide_v;
    args.q = io == DType::bf16 ? q.view() : widened(q, wide_q);
    args.k = io == DType::bf16 ? k.view() : widened(k, wide_k);
    args.v = io == DType::bf16 ? v.view() : widened(v, wide_v);
    args.g = file.find("g", DType::f32, 3).view();
    args.beta = file.find("beta", DType::f32, 3).view();
    args.A_log = file.find("A_log", DType::f32, 1).view();
    args.dt_bias = file.find("dt_bias", DType::f32, 1).view();
    args.o = o_ref.view();
    args.o.data = result.o.data();
    args.final_state = state_ref.view();
    args.final_state.data = result.state.data();

    struct alignas(64) Line {
        std::byte bytes[64];
    };
    const std::size_t bytes = plan.workspace_bytes(flashqla::Pass::forward);
    std::vector<Line> workspace((bytes + 63) / 64);
    flashqla::check(flashqla::forward(plan, args, {workspace.data(), bytes}));

    const auto heads = static_cast<std::size_t>(problem.heads_v);
    result.o_error = errors_by_head(result.o, file.values<float>(o_ref), result.o.size() / heads / v.shape[3], heads);
    result.state_error = errors_by_head(result.state, file.values<float>(state_ref), 1, heads);
    return result;
}

bool check_all(const Model& model, const std::string& directory, const std::string& backend) {
    const Reference reference = load_reference(directory);
    const auto rows = static_cast<std::int64_t>(reference.input.size());
    const auto logits_with = [&](const std::string& rule) {
        Network network(model, {.users = 1, .max_rows = rows, .backend = rule});
        const Piece piece{0, reference.input};
        const auto logits = network.prefill({&piece, 1}, Rows::all);
        return std::vector<float>(logits.begin(), logits.end());
    };
    const auto logits = logits_with(backend), oracle_logits = logits_with("reference");
    Table table;
    table.title("against transformers in fp32; of heads the worst");
    table.error("logits of the first 256 bytes", relative_l2(logits, reference.logits), 1e-5);
    table.count("most likely next byte", agreeing_argmax(logits, reference.logits, 256), rows);

    Network network(model, {.users = 1, .max_rows = rows, .backend = backend});
    Sampler greedy(0, 0);
    const auto length = static_cast<std::int64_t>(reference.continuation.size());
    const std::string text = generate(network, {&reference.prompt, 1}, length, {&greedy, 1}).texts[0];
    table.count("greedy text", std::ranges::mismatch(text, reference.continuation).in1 - text.begin(), length);

    const RuleCheck in_f32 = check_rule(directory, backend, DType::f32);
    const RuleCheck in_bf16 = check_rule(directory, backend, DType::bf16);
    const RuleCheck oracle = check_rule(directory, "reference", DType::bf16);
    const auto rule_lines = [&](const std::string& what, const RuleCheck& rule, double limit) {
        table.error("layer 1, " + what + ": o", std::ranges::max(rule.o_error), limit);
        table.error("layer 1, " + what + ": final state", std::ranges::max(rule.state_error), limit);
    };
    rule_lines("q k v in f32", in_f32, 1e-5);
    rule_lines("q k v in bf16", in_bf16, 5e-3);
    rule_lines("the library's oracle", oracle, 1e-5);

    table.title("against the library's oracle, the token recurrence in double precision");
    table.error("logits of the first 256 bytes", relative_l2(logits, oracle_logits), 1e-5);
    table.error("layer 1, q k v in f32: o", relative_l2(in_f32.o, oracle.o), 1e-5);
    table.error("layer 1, q k v in f32: final state", relative_l2(in_f32.state, oracle.state), 1e-5);
    return table.good();
}

}  // namespace qwen3_next
