#include "generate.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace qwen3_next {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

char Sampler::pick(std::span<const float> logits) {
    const auto largest = std::ranges::max_element(logits);
    if (temperature_ <= 0) return static_cast<char>(largest - logits.begin());
    double total = 0;
    std::vector<double> weights;
    for (const float logit : logits) {
        weights.push_back(std::exp((static_cast<double>(logit) - *largest) / temperature_));
        total += weights.back();
    }
    double left = std::ldexp(static_cast<double>(random_() >> 11), -53) * total;
    for (std::size_t i = 0; i < weights.size(); ++i) {
        left -= weights[i];
        if (left < 0) return static_cast<char>(i);
    }
    return static_cast<char>(largest - logits.begin());  // rounding left a rest
}

Generation generate(Network& network, std::span<const std::string> prompts, std::int64_t bytes,
                    std::span<Sampler> samplers, const std::function<void(std::int32_t, char)>& on_byte) {
    Generation result;
    const auto users = static_cast<std::int32_t>(prompts.size());
    std::string current(prompts.size(), '\0');  // the newest byte of each user

    const auto choose = [&](std::int32_t user, std::span<const float> logits) {
        const auto n = static_cast<std::size_t>(user);
        current[n] = samplers[n].pick(logits);
        result.texts[n] += current[n];
        if (on_byte) on_byte(user, current[n]);
    };

    double start = now();
    result.texts.resize(prompts.size());
    for (std::int32_t user = 0; user < users; ++user) {
        const std::string& prompt = prompts[static_cast<std::size_t>(user)];
        network.reset(user);
        const auto logits = network.read(user, prompt);
        result.prefill_bytes += static_cast<std::int64_t>(prompt.size());
        if (bytes > 0) choose(user, logits);
    }
    result.prefill_seconds = now() - start;

    start = now();
    std::vector<Piece> pieces;
    for (std::int32_t user = 0; user < users; ++user) {
        pieces.push_back({user, std::string_view(current).substr(static_cast<std::size_t>(user), 1)});
    }
    for (std::int64_t i = 1; i < bytes; ++i) {
        const auto logits = network.decode(pieces);
        const std::size_t vocabulary = logits.size() / pieces.size();
        for (std::int32_t user = 0; user < users; ++user) {
            choose(user, logits.subspan(static_cast<std::size_t>(user) * vocabulary, vocabulary));
        }
        result.decode_bytes += users;
    }
    result.decode_seconds = now() - start;
    return result;
}

}  // namespace qwen3_next
