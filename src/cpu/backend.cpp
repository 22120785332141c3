#include <omp.h>

#include <algorithm>
#include <string>

#include "cpu/cpu.hpp"
#include "cpu/kernels.hpp"
#include "cpu/plans.hpp"

namespace flashqla {
namespace cpu {

// NOTE: libgomp ends the process when it cannot start a thread, so a plan never asks for absurdly many.
constexpr std::int32_t kMaxThreads = 1024;

std::int32_t threads_of(const PlanOptions& options) {
    return std::clamp(options.threads > 0 ? options.threads : omp_get_max_threads(), 1, kMaxThreads);
}

namespace {

constexpr std::int32_t kMaxDimK = 256, kMaxDimV = 512;
// Bytes; sums of a few such figures still fit in 64 bits.
constexpr double kMostWorkspace = 0x1p60;

Support supports(const PlanRequest& request) {
    const Problem& p = request.problem;
    if (request.device.type != DeviceType::cpu) return {"cpu runs on the CPU only"};
    if (p.gate == Gate::vector) return {"cpu has no gate per key channel (Gate::vector) yet"};
    if (p.dim_k > kMaxDimK)
        return {"cpu supports dim_k up to " + std::to_string(kMaxDimK) + ", not " + std::to_string(p.dim_k)};
    if (p.dim_v > kMaxDimV)
        return {"cpu supports dim_v up to " + std::to_string(kMaxDimV) + ", not " + std::to_string(p.dim_v)};
    // States and transitions of the segments that a sequence may be cut into.
    const double segments = std::max(request.options.context_split, kMaxAutomaticSegments);
    const double states = static_cast<double>(std::max(p.sequences, p.batch)) * p.heads_v * p.dim_k;
    if (states * std::max(p.dim_k, p.dim_v) * segments * sizeof(float) > kMostWorkspace)
        return {"cpu would need an absurd workspace for the states of that many sequences and segments"};
    return {};
}

std::unique_ptr<PassPlan> plan(const PlanRequest& request) {
    switch (request.pass) {
        case Pass::forward: return plan_forward(request);
        case Pass::backward: return plan_backward(request);
        case Pass::decode: break;
    }
    return plan_decode(request);
}

std::string info() {
    return std::string("SIMD target ") + kernels().name + " of " + supported_targets() + ", up to " +
           std::to_string(omp_get_max_threads()) + " threads";
}

}  // namespace
}  // namespace cpu

const Backend kCpuBackend{"cpu", DeviceType::cpu, cpu::supports, cpu::plan, cpu::info};

}  // namespace flashqla
