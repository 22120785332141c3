// qwen3_next: runs a Qwen3-Next language model on the FlashQLA library.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

#include "bench.hpp"
#include "check.hpp"
#include "generate.hpp"
#include "score.hpp"

namespace qwen3_next {
namespace {

struct Options {
    std::string directory, backend, score_file;
    std::vector<std::string> prompts;
    std::int64_t tokens = 400, window = 1024;
    float temperature = 0.7f;
    std::uint64_t seed = 1;
    bool greedy = false, score = false, check = false, bench = false;
};

std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error(path + " cannot be read");
    std::ostringstream content;
    content << file.rdbuf();
    return content.str();
}

// A model may write anything; a terminal must not obey it.
void print_byte(char byte) {
    const auto code = static_cast<unsigned char>(byte);
    if ((code < 32 && byte != '\n' && byte != '\t') || code == 127) {
        std::printf("\\x%02x", code);
    } else {
        std::putchar(byte);
    }
}

void run_prompts(const Model& model, const Options& options) {
    const std::size_t users = options.prompts.size();
    Network network(model, {.users = static_cast<std::int32_t>(users), .max_rows = 1024, .backend = options.backend});
    std::vector<Sampler> samplers;
    for (std::size_t n = 0; n < users; ++n) {
        samplers.emplace_back(options.greedy ? 0.0f : options.temperature, options.seed + n);
    }
    // One user's text is shown while it grows. Several grow together, so they are shown afterwards.
    const auto stream = [](std::int32_t, char byte) {
        print_byte(byte);
        std::fflush(stdout);
    };
    if (users == 1) {
        std::fputs(options.prompts[0].c_str(), stdout);
        std::fflush(stdout);
    }
    const Generation result = generate(
        network, options.prompts, options.tokens, samplers,
        users == 1 ? std::function<void(std::int32_t, char)>(stream) : std::function<void(std::int32_t, char)>());
    for (std::size_t n = 0; n < users && users > 1; ++n) {
        std::printf("---- user %zu\n%s", n, options.prompts[n].c_str());
        for (const char byte : result.texts[n]) print_byte(byte);
        std::printf("\n");
    }
    std::printf("\n");
    std::fflush(stdout);
    std::fprintf(stderr, "prefill %lld bytes, %.0f bytes/s; decode %lld bytes, %.0f bytes/s\n",
                 static_cast<long long>(result.prefill_bytes),
                 static_cast<double>(result.prefill_bytes) / result.prefill_seconds,
                 static_cast<long long>(result.decode_bytes),
                 static_cast<double>(result.decode_bytes) / std::max(1e-9, result.decode_seconds));
}

void run_score(const Model& model, const Options& options) {
    const bool own_text = options.score_file.empty();
    const std::string path = own_text ? options.directory + "/heldout.txt" : options.score_file;
    const std::string text = read_file(path);
    std::printf("bits per byte of %s, %zu bytes\n", path.substr(path.rfind('/') + 1).c_str(), text.size());
    // What is known about the model's own text.
    const auto metrics = own_text
                             ? nlohmann::json::parse(std::ifstream(options.directory + "/metrics.json"), nullptr, false)
                             : nlohmann::json();
    const auto known = [&](const char* where, const char* name) {
        const auto value = metrics.value(nlohmann::json::json_pointer(where), -1.0);
        if (value >= 0) std::printf("  %-44s %9.4f\n", name, value);
    };
    if (metrics.is_object()) {
        known("/compressors_bits_per_byte/gzip_9", "gzip -9");
        known("/compressors_bits_per_byte/xz_9e", "xz -9e");
        if (options.window == 1024) known("/bits_per_byte_windows_of_1024", "transformers, windows of 1024 bytes");
        known("/bits_per_byte", "transformers, one sequence");
    }
    const auto report = [](const std::string& what, const auto& work) {
        const auto start = std::chrono::steady_clock::now();
        const Score score = work();
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
        std::printf("  %-44s %9.4f   (%.1f s, %.0f bytes/s)\n", what.c_str(), score.per_byte(), taken.count(),
                    static_cast<double>(score.bytes) / taken.count());
        std::fflush(stdout);
    };
    std::fflush(stdout);
    if (options.window > 0 && static_cast<std::size_t>(options.window) < text.size()) {
        Network network(model, {.users = 4, .max_rows = 4 * options.window, .backend = options.backend});
        report("this program, windows of " + std::to_string(options.window) + " bytes",
               [&] { return score_windows(network, text, options.window); });
    }
    Network network(model, {.users = 1, .max_rows = 1024, .backend = options.backend});
    report("this program, one sequence", [&] { return score_text(network, text); });
}

int run(const Options& options) {
    const Model model = load_model(options.directory);
    const Config& c = model.config;
    const GdnEngine engine(c, 1, 64, options.backend);
    std::fprintf(
        stderr,
        "%lld layers, hidden size %lld, %d key heads, %d value heads, K = %d, V = %d; %.2f million parameters; "
        "backend %s\n",
        static_cast<long long>(c.layers), static_cast<long long>(c.hidden), c.heads_k, c.heads_v, c.dim_k, c.dim_v,
        1e-6 * static_cast<double>(model.parameters),
        std::string(engine.prefill_plan().backend(flashqla::Pass::forward)).c_str());
    bool first = true;
    const auto section = [&](bool wanted) {
        if (wanted && !first) std::printf("\n");
        first = first && !wanted;
        return wanted;
    };
    if (section(!options.prompts.empty())) run_prompts(model, options);
    if (section(options.score)) run_score(model, options);
    if (section(options.bench)) bench(model, read_file(options.directory + "/heldout.txt"), options.backend);
    if (section(options.check) && !check_all(model, options.directory, options.backend)) return 1;
    return 0;
}

}  // namespace
}  // namespace qwen3_next

int main(int argc, char** argv) {
    qwen3_next::Options options;
    CLI::App app{"Runs a Qwen3-Next language model of bytes on the FlashQLA library."};
    app.add_option("MODEL_DIR", options.directory, "config.json and model.safetensors")->required();
    app.add_option("--prompt", options.prompts, "Text to continue; several times: several users, decoded together")
        ->take_all()
        ->expected(1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    app.add_option("--tokens", options.tokens, "Bytes to generate for each prompt")->check(CLI::Range(0, 1 << 24));
    auto* greedy = app.add_flag("--greedy", options.greedy, "Always take the most likely byte");
    app.add_option("--temperature", options.temperature, "0 is greedy")
        ->check(CLI::Range(0.0, 100.0))
        ->excludes(greedy);
    app.add_option("--seed", options.seed, "Seed of the first user; the next one has the next number");
    auto* score =
        app.add_option("--score", options.score_file, "Bits per byte of a file (default: the model's heldout.txt)");
    score->expected(0, 1);
    app.add_option("--window", options.window, "--score: also in windows of this length; 0: not")
        ->check(CLI::Range(0, 1 << 20));
    app.add_flag("--check", options.check, "Compare with transformers' results beside the model, and with the oracle");
    app.add_flag("--bench", options.bench, "Time prefill, decode and the gated delta rule");
    app.add_option("--backend", options.backend, "Backend of the gated delta rule (default: the library's choice)");
    CLI11_PARSE(app, argc, argv);
    options.score = score->count() > 0;
    if (options.prompts.empty() && !options.score && !options.check && !options.bench) {
        std::fprintf(stderr, "qwen3_next: nothing to do; give --prompt, --score, --check or --bench\n");
        return 2;
    }
    try {
        return qwen3_next::run(options);
    } catch (const std::exception& error) {
        std::fflush(stdout);
        std::fprintf(stderr, "qwen3_next: %s\n", error.what());
        return 1;
    }
}
