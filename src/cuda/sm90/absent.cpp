// For builds without code for compute capability 9.0a: nothing here is ever called, since no GPU counts as a Hopper.
#include "cuda/host/error.hpp"
#include "cuda/sm90/adjoint/params.hpp"
#include "cuda/sm90/chunk/params.hpp"
#include "cuda/sm90/forward/params.hpp"
#include "cuda/sm90/gradient/params.hpp"

namespace flashqla::cuda::sm90 {

Status launch_forward(const char*, const ChunkParams&, int, Stream) noexcept { return {}; }
Status launch_chunks(const char*, const ChunkParams&, int, Stream) noexcept { return {}; }
Status launch_adjoints(const char*, const AdjointParams&, int, Stream) noexcept { return {}; }
Status launch_gradients(const char*, const GradientParams&, std::int64_t, int, Stream) noexcept { return {}; }

}  // namespace flashqla::cuda::sm90
