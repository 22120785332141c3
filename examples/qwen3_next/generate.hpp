// Continues prompts, all users at once, byte by byte.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "network.hpp"

namespace qwen3_next {

// Chooses the next byte. Temperature 0 is greedy. The same seed gives the same text with every compiler.
class Sampler {
public:
    Sampler(float temperature, std::uint64_t seed) : temperature_(temperature), random_(seed) {}
    char pick(std::span<const float> logits);

private:
    float temperature_;
    std::mt19937_64 random_;
};

struct Generation {
    std::vector<std::string> texts;  // one a prompt, without the prompt
    double prefill_seconds = 0, decode_seconds = 0;
    std::int64_t prefill_bytes = 0, decode_bytes = 0;  // of all users together
};

// User n continues prompts[n] by `bytes` bytes. on_byte(user, byte) is called as soon as a byte is known.
Generation generate(Network& network, std::span<const std::string> prompts, std::int64_t bytes,
                    std::span<Sampler> samplers, const std::function<void(std::int32_t, char)>& on_byte = {});

}  // namespace qwen3_next
