// Plans and runs forward, decode and commit by the token recurrence: everything from bounds, nothing from lengths, so
// that a captured call can be replayed with other lengths and slots.
#include <algorithm>
#include <string>

#include "cuda/chunk_setup.hpp"
#include "cuda/plans.hpp"
#include "cuda/sm80/commit/params.hpp"
#include "cuda/sm80/decode/params.hpp"
#include "cuda/sm80/recurrent/params.hpp"

namespace flashqla::cuda {
namespace {

std::int32_t tiles_of(const Problem& p) {
    const std::int32_t columns = sm80::recurrent_columns(p.dim_k);
    return (p.dim_v + columns - 1) / columns;
}

class RecurrentPlan final : public PassPlan {
public:
    explicit RecurrentPlan(const PlanRequest& request)
        : device_(request.device.index), split_asked_(request.options.context_split) {
        const Problem& p = request.problem;
        const auto rows = static_cast<std::uint32_t>(sequences_of(p) * p.heads_v);
        grid_.tiles = static_cast<std::uint32_t>(tiles_of(p));
        grid_.state_blocks = rows * grid_.tiles;
        grid_.zero_blocks = zero_blocks_of(p);
        commit_parts_ =
            static_cast<std::uint32_t>((p.dim_k * p.dim_v + sm80::kCommitElements - 1) / sm80::kCommitElements);
        commit_blocks_ = rows * commit_parts_;
        width_ = sm80::recurrent_width(p.dim_k);
        columns_ = sm80::recurrent_columns(p.dim_k);
        one_token_ = request.pass == Pass::decode && sm80::has_decode_kernel(p);
    }

    std::string explain() const override {
        std::string text = "token recurrence, states in registers in tiles of " + std::to_string(width_) + " keys x " +
                           std::to_string(columns_) + " columns; " + std::to_string(grid_.state_blocks) +
                           " blocks over (sequence, value head, tile), " + std::to_string(grid_.zero_blocks) +
                           " for tokens past the last sequence; one launch";
        if (one_token_) text += "; the decode kernel instead where columns fill whole strips and rows are aligned";
        if (split_asked_ > 1) {
            text += "; context_split " + std::to_string(split_asked_) + " is not followed: sequences stay in one piece";
        }
        return text;
    }

    Status run(const ForwardCall& call, std::byte*, Stream stream) const noexcept override {
        return sm80::launch_recurrent(call, grid_, device_, stream);
    }
    Status run(const DecodeCall& call, std::byte*, Stream stream) const noexcept override {
        if (sm80::decode_fits(call)) return sm80::launch_decode(call, device_, stream);
        return sm80::launch_recurrent(call, grid_, device_, stream);
    }
    Status run(const CommitCall& call, std::byte*, Stream stream) const noexcept override {
        return sm80::launch_commit(call, commit_parts_, commit_blocks_, device_, stream);
    }

private:
    int device_;
    std::int32_t split_asked_;
    sm80::RecurrentGrid grid_;
    std::uint32_t commit_parts_ = 0, commit_blocks_ = 0;
    int width_ = 0, columns_ = 0;
    bool one_token_ = false;
};

}  // namespace

double recurrent_blocks(const Problem& p) {
    return static_cast<double>(sequences_of(p)) * p.heads_v * tiles_of(p) + zero_blocks_of(p);
}

std::unique_ptr<PassPlan> plan_recurrent(const PlanRequest& request) {
    return std::make_unique<RecurrentPlan>(request);
}

}  // namespace flashqla::cuda
