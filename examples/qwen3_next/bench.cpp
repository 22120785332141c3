#include "bench.hpp"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

#include "generate.hpp"
#include "network.hpp"

namespace qwen3_next {
namespace {

struct Timing {
    double seconds;  // a byte
    double rule;     // of these, inside the library
};

// The median of three runs, after one that warms up.
Timing time(const Network& network, std::int64_t bytes, const std::function<void()>& work) {
    std::vector<Timing> runs;
    for (int i = 0; i < 4; ++i) {
        const double rule = network.gdn().rule_seconds();
        const auto start = std::chrono::steady_clock::now();
        work();
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
        const auto each = static_cast<double>(bytes);
        if (i > 0) runs.push_back({taken.count() / each, (network.gdn().rule_seconds() - rule) / each});
    }
    std::ranges::sort(runs, {}, &Timing::seconds);
    return runs[1];
}

Timing time_prefill(const Model& model, std::string_view text, const std::string& backend) {
    Network network(model, {.users = 1, .max_rows = 1024, .backend = backend});
    return time(network, static_cast<std::int64_t>(text.size()), [&] {
        network.reset(0);
        network.read(0, text);
    });
}

Timing time_decode(const Model& model, std::string_view text, std::int32_t users, const std::string& backend) {
    constexpr std::size_t kSteps = 128;
    Network network(model, {.users = users, .max_rows = 64, .backend = backend});
    return time(network, static_cast<std::int64_t>(kSteps) * users, [&] {
        std::vector<Piece> pieces(static_cast<std::size_t>(users));
        for (std::size_t step = 0; step < kSteps; ++step) {
            for (std::int32_t n = 0; n < users; ++n) {
                pieces[static_cast<std::size_t>(n)] = {
                    n, text.substr((step + static_cast<std::size_t>(n)) % text.size(), 1)};
            }
            network.decode(pieces);
        }
    });
}

void speed_line(const char* what, const Timing& timing) {
    std::printf("  %-44s %9.0f bytes/s   %3.0f %% of the time in the gated delta rule\n", what, 1 / timing.seconds,
                100 * timing.rule / timing.seconds);
}

}  // namespace

void bench(const Model& model, std::string_view text, const std::string& backend) {
    constexpr std::int32_t kUsers = 8;
    text = text.substr(0, 4096);
    const Config& c = model.config;
    const Timing prefill = time_prefill(model, text, backend);
    const Timing decode = time_decode(model, text, 1, backend);
    const Timing batch = time_decode(model, text, kUsers, backend);
    const Timing naive = time_prefill(model, text.substr(0, 256), "reference");

    std::printf("speed on %d threads; a token is a byte\n", omp_get_max_threads());
    speed_line("prefill, pieces of 1024", prefill);
    speed_line("decode, one user", decode);
    speed_line("decode, 8 users at once, all together", batch);

    const double layers = static_cast<double>(c.layers);
    const auto rule_line = [&](const char* what, const Timing& timing) {
        std::printf("  %-44s %9.2f us        %6.1fx the naive recurrence\n", what, 1e6 * timing.rule / layers,
                    naive.rule / timing.rule);
    };
    std::printf("the gated delta rule alone, for a byte in a layer (%d heads, K = %d, V = %d)\n", c.heads_v, c.dim_k,
                c.dim_v);
    rule_line("prefill: chunks of 64 as matrix products", prefill);
    rule_line("decode: SIMD token recurrence, one user", decode);
    rule_line("naive recurrence", naive);
    std::printf(
        "  (naive: the library's oracle, a scalar loop over tokens in double precision on one thread; it is\n"
        "  written to be obviously right, not fast)\n");
}

}  // namespace qwen3_next
