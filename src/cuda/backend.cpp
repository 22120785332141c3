// The backend for every NVIDIA GPU from sm_80 on.
#include <string>

#include "cuda/cuda.hpp"
#include "cuda/host/device.hpp"
#include "cuda/plans.hpp"

namespace flashqla {
namespace cuda {
namespace {

constexpr std::int32_t kMaxDimK = 256, kMaxDimV = 512;
constexpr double kMostBlocks = 2147483647.0;

std::string capability(const GpuInfo& gpu) { return std::to_string(gpu.major) + "." + std::to_string(gpu.minor); }

Support supports_device(std::int32_t index) {
    const Gpus& found = gpus();
    if (found.list.empty()) return {found.problem};
    const auto count = static_cast<std::int32_t>(found.list.size());
    if (index >= count)
        return {"there is no cuda:" + std::to_string(index) +
                "; the GPUs are cuda:0 to cuda:" + std::to_string(count - 1)};
    const GpuInfo& gpu = found.list[static_cast<std::size_t>(index)];
    if (!has_code_for(architectures(), gpu.major, gpu.minor))
        return {"cuda:" + std::to_string(index) + " (" + gpu.name + ") has compute capability " + capability(gpu) +
                "; this build has code for " + std::string(architectures())};
    return {};
}

Support supports(const PlanRequest& request) {
    const Problem& p = request.problem;
    if (p.gate == Gate::vector) return {"cuda-sm80 has no gate per key channel (Gate::vector) yet"};
    if (p.dim_k > kMaxDimK)
        return {"cuda-sm80 supports dim_k up to " + std::to_string(kMaxDimK) + ", not " + std::to_string(p.dim_k)};
    if (p.dim_v > kMaxDimV)
        return {"cuda-sm80 supports dim_v up to " + std::to_string(kMaxDimV) + ", not " + std::to_string(p.dim_v)};
    if (recurrent_blocks(p) > kMostBlocks)
        return {"cuda-sm80 would need more than 2^31 - 1 blocks for that many sequences and heads"};
    Support device = supports_device(request.device.index);
    if (device.ok() && request.pass == Pass::backward) return {why_not_backward(request)};
    return device;
}

std::unique_ptr<PassPlan> plan(const PlanRequest& request) {
    if (request.pass == Pass::backward) return plan_chunked_backward(request);
    return request.pass == Pass::forward && forward_in_chunks(request) ? plan_chunked_forward(request)
                                                                       : plan_recurrent(request);
}

std::string info() { return "forward, backward, decode and commit; code for " + std::string(architectures()); }

std::string list_gpus() {
    const Gpus& found = gpus();
    if (found.list.empty()) return "none (" + found.problem + ")";
    std::string text;
    for (std::size_t i = 0; i < found.list.size(); ++i) {
        const GpuInfo& gpu = found.list[i];
        text += (i ? "; " : "") + ("cuda:" + std::to_string(i)) + " " + gpu.name + ", compute capability " +
                capability(gpu) + ", " + std::to_string(gpu.multiprocessors) + " multiprocessors, " +
                std::to_string(gpu.shared_bytes / 1024) + " KiB shared memory a block" +
                (has_code_for(architectures(), gpu.major, gpu.minor) ? "" : ", no code in this build");
    }
    return text;
}

}  // namespace
}  // namespace cuda

const Backend kCudaSm80Backend{"cuda-sm80", DeviceType::cuda, cuda::supports, cuda::plan, cuda::info, cuda::list_gpus};

}  // namespace flashqla
