// Chooses the SIMD target once per process.
#include "cpu/dispatch.hpp"

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/targets.hpp"
//
#include "hwy/highway.h"

namespace flashqla::cpu {
namespace {

// Whether the processor has bf16 dot products, and whether they are faster than fp32 ones: Intel issues half as many a
// cycle as fp32 multiply-adds. Emerald Rapids took 57 us a token with them and 35 without, Zen 4 24 and 39.
#if HWY_ARCH_X86
[[maybe_unused]] bool has_bf16_dot() { return __builtin_cpu_supports("avx512bf16"); }
bool bf16_dot_pays() { return __builtin_cpu_is("amd"); }
#else
[[maybe_unused]] bool has_bf16_dot() { return false; }
bool bf16_dot_pays() { return false; }
#endif

constexpr const char* kBf16Target = "AVX512-BF16";

const char* name_of_target(std::int64_t target) {
    if (target == HWY_AVX3) return "AVX512";
    if (target == HWY_AVX3_DL) return kBf16Target;
    return hwy::TargetName(target);
}

struct Registry {
    std::vector<Kernels> all;  // best first
    std::string names;
    const Kernels* chosen = nullptr;

    Registry() {
#if HWY_IDE || ((HWY_TARGETS & (HWY_TARGETS - 1)) == 0)
        std::int64_t usable = HWY_STATIC_TARGET;
#else
        std::int64_t usable = hwy::SupportedTargets() & HWY_TARGETS;
        if (!has_bf16_dot()) usable &= ~std::int64_t{HWY_AVX3_DL};
#endif
        // A lower bit is a better target.
        for (std::uint64_t rest = static_cast<std::uint64_t>(usable); rest != 0; rest &= rest - 1) {
            const auto target = static_cast<std::int64_t>(rest & (~rest + 1));
            Kernels k{};
            k.name = name_of_target(target);
            k.bf16_dot = target == HWY_AVX3_DL && bf16_dot_pays();
            add_forward(k, target);
            add_recurrent(k, target);
            add_backward(k, target);
            all.push_back(k);
            if (!names.empty()) names += ',';
            names += k.name;
        }
        chosen = &all.front();
        if (const char* wanted = std::getenv("FQLA_CPU_TARGET"))
            for (Kernels& k : all)
                if (std::string_view(wanted) == k.name) {
                    k.bf16_dot = std::string_view(k.name) == kBf16Target;  // asked for by name: use what it has
                    chosen = &k;
                }
    }
};

const Registry& registry() {
    static const Registry instance;
    return instance;
}

}  // namespace

const Kernels& kernels() noexcept { return *registry().chosen; }
const char* supported_targets() noexcept { return registry().names.c_str(); }

}  // namespace flashqla::cpu
