#include "cuda/sm80/decode/config.cuh"
#include "cuda/sm80/decode/params.hpp"

namespace flashqla::cuda::sm80 {
namespace {

bool is_aligned(const void* data, std::size_t bytes) { return reinterpret_cast<std::uintptr_t>(data) % bytes == 0; }

// Rows of K that can be read four numbers at a time.
bool has_aligned_rows(const TokenRef& x) {
    return is_aligned(x.data, 4 * size_of(x.dtype)) && x.batch % 4 == 0 && x.head % 4 == 0;
}

bool has_aligned_words(const StateRef& x) {
    const std::int64_t word = 16 / static_cast<std::int64_t>(size_of(x.dtype));
    return is_aligned(x.data, 16) && x.row % word == 0 && x.head % word == 0;
}

}  // namespace

bool has_decode_kernel(const Problem& p) noexcept {
    // Every layout and type has the same sizes.
    return p.tokens == 1 && p.sequences == 0 &&
           with_decode_width<true, float>(p.dim_k, false, []<class Config>(Config) { return true; });
}

bool decode_fits(const DecodeCall& call) noexcept {
    constexpr std::int64_t kMostBlocks = 2147483647;
    const Problem& p = call.problem;
    if (!has_decode_kernel(p) || call.intermediate_states || call.slot_per_token()) return false;
    if (!has_aligned_rows(call.q) || !has_aligned_rows(call.k) || !has_aligned_words(call.state)) return false;
    const auto width_of = []<class Config>(Config) { return Config::kWidth; };
    const int width = p.state_layout == StateLayout::vk ? with_decode_config<true>(call, 0, width_of)
                                                        : with_decode_config<false>(call, 0, width_of);
    if (width == 0 || p.dim_v % width != 0) return false;
    return call.count <= kMostBlocks / (p.dim_v / width) / p.heads_v;
}

Status launch_decode(const DecodeCall& call, int device, Stream stream) noexcept {
    const LaunchSite site{"flashqla::decode", "decode", device, stream};
    return call.problem.state_layout == StateLayout::vk ? launch_decode_vk(site, call) : launch_decode_kv(site, call);
}

}  // namespace flashqla::cuda::sm80
