// What this build is and what it runs on.
#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "api/backends.hpp"
#include "flashqla/flashqla.h"

#ifndef FQLA_VERSION
#define FQLA_VERSION "0.1.0"
#endif
#ifndef FQLA_BUILD_TEXT
#define FQLA_BUILD_TEXT "unknown"
#endif

namespace flashqla {
namespace {

std::string compiler() {
#if defined(__clang__)
    return "clang " __clang_version__;
#elif defined(__GNUC__)
    return "gcc " __VERSION__;
#else
    return "unknown";
#endif
}

std::string architecture() {
#if defined(__x86_64__)
    return "x86-64";
#elif defined(__aarch64__)
    return "aarch64";
#else
    return "unknown";
#endif
}

// The value of the first of `keys` in Linux's list of processors; "" where there is none.
std::string cpu_field(std::initializer_list<const char*> keys) {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);) {
        const std::size_t colon = line.find(':');
        if (colon == std::string::npos) continue;
        const std::string key = line.substr(0, line.find_last_not_of(" \t", colon - 1) + 1);
        if (std::find(keys.begin(), keys.end(), key) == keys.end()) continue;
        const std::size_t value = line.find_first_not_of(" \t", colon + 1);
        return value == std::string::npos ? "" : line.substr(value);
    }
    return {};
}

// Of everything the processor can do, what matters to the kernels.
std::string cpu_features() {
    constexpr const char* kWanted[] = {"sse4_1",   "avx",      "avx2",        "fma",         "f16c",        "avx512f",
                                       "avx512bw", "avx512vl", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16",
                                       "amx_tile", "asimd",    "fphp",        "asimdhp",     "asimddp",     "bf16",
                                       "i8mm",     "sve",      "sve2"};
    std::istringstream words(cpu_field({"flags", "Features"}));
    std::string text;
    for (std::string word; words >> word;) {
        if (std::find(std::begin(kWanted), std::end(kWanted), word) == std::end(kWanted)) continue;
        text += (text.empty() ? "" : " ") + word;
    }
    return text.empty() ? "unknown" : text;
}

// What the first backend for GPUs sees.
std::string gpus() {
    for (const Backend* backend : backends()) {
        if (backend->gpus != nullptr) return backend->gpus();
    }
    return "none (no GPU backend in this build)";
}

}  // namespace

const char* version() noexcept { return FQLA_VERSION; }

std::int32_t abi_version() noexcept { return FQLA_ABI_VERSION; }

std::string backend_names() {
    std::string names;
    for (const Backend* backend : backends()) names += (names.empty() ? "" : ", ") + std::string(backend->name);
    return names;
}

std::string system_info() {
    std::ostringstream out;
    out << "version: " << version() << '\n';
    out << "abi: " << abi_version() << '\n';
    out << "compiler: " << compiler() << '\n';
    out << "build: " << FQLA_BUILD_TEXT << '\n';
    out << "architecture: " << architecture() << '\n';
    out << "backends: " << backend_names() << '\n';
    for (const Backend* backend : backends()) out << "backend " << backend->name << ": " << backend->info() << '\n';
    const std::string model = cpu_field({"model name", "Model", "CPU part"});
    out << "cpu: " << (model.empty() ? "unknown" : model) << '\n';
    out << "cpu features: " << cpu_features() << '\n';
    out << "cpu threads: " << std::max(1u, std::thread::hardware_concurrency()) << '\n';
    out << "gpus: " << gpus() << '\n';
    return out.str();
}

}  // namespace flashqla
