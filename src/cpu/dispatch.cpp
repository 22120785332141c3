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

#if HWY_ARCH_X86
[[maybe_unused]] bool has_bf16_dot() { return __builtin_cpu_supports("avx512bf16"); }
#else
[[maybe_unused]] bool has_bf16_dot() { return false; }
#endif

const char* name_of_target(std::int64_t target) {
    if (target == HWY_AVX3) return "AVX512";
    if (target == HWY_AVX3_DL) return "AVX512-BF16";
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
            k.bf16_dot = target == HWY_AVX3_DL;
            add_forward(k, target);
            add_recurrent(k, target);
            add_backward(k, target);
            all.push_back(k);
            if (!names.empty()) names += ',';
            names += k.name;
        }
        chosen = &all.front();
        if (const char* wanted = std::getenv("FQLA_CPU_TARGET"))
            for (const Kernels& k : all)
                if (std::string_view(wanted) == k.name) chosen = &k;
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
