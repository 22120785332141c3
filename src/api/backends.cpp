#include "api/backends.hpp"

#include "reference/reference.hpp"
#ifdef FQLA_HAVE_CPU
#include "cpu/cpu.hpp"
#endif
#ifdef FQLA_HAVE_CUDA
#include "cuda/cuda.hpp"
#endif

namespace flashqla {
namespace {

constexpr const Backend* kBackends[] = {
#ifdef FQLA_HAVE_CUDA
    &kCudaSm80Backend,
#endif
#ifdef FQLA_HAVE_CPU
    &kCpuBackend,
#endif
    &kReferenceBackend,
};

}  // namespace

std::span<const Backend* const> backends() noexcept { return kBackends; }

}  // namespace flashqla
