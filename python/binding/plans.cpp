#include "plans.hpp"

#include <algorithm>
#include <atomic>
#include <functional>
#include <list>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace flashqla::python {
namespace {

constexpr std::size_t kMostPlans = 256;  // a plan is about a kilobyte; ragged batches make many problems

std::atomic<bool> forked{false};

// The whole problem is the key. NOTE: taken apart by structured bindings, so that a field added to Problem or
// PlanOptions does not compile until it is here.
auto fields(const Problem& p) {
    const auto& [batch, tokens, sequences, heads_k, heads_v, dim_k, dim_v, io, out, gate, beta_mode, beta_factor,
                 qk_l2norm, l2norm_eps, scale, grouping, state_layout, pad_rule, checkpoints, checkpoint_every,
                 decode_rows, for_backward] = p;
    return std::tie(batch, tokens, sequences, heads_k, heads_v, dim_k, dim_v, io, out, gate, beta_mode, beta_factor,
                    qk_l2norm, l2norm_eps, scale, grouping, state_layout, pad_rule, checkpoints, checkpoint_every,
                    decode_rows, for_backward);
}
auto fields(const PlanOptions& o) {
    const auto& [backend, threads, context_split, deterministic, batch_invariant] = o;
    return std::tie(backend, threads, context_split, deterministic, batch_invariant);
}

struct Key {
    Problem problem;
    Device device;
    PlanOptions options;
    bool operator==(const Key& other) const {
        return fields(problem) == fields(other.problem) && device == other.device &&
               fields(options) == fields(other.options);
    }
};

struct Hash {
    template <class T>
    static std::size_t one(const T& value) {
        if constexpr (std::is_enum_v<T>) {
            return static_cast<std::size_t>(value);
        } else {
            return std::hash<T>{}(value);
        }
    }
    std::size_t operator()(const Key& key) const {
        std::size_t sum = static_cast<std::size_t>(key.device.index);
        const auto add = [&](const auto&... value) {
            ((sum = (sum ^ one(value)) * 0x9e3779b97f4a7c15u, sum ^= sum >> 29), ...);
        };
        std::apply(add, fields(key.problem));
        std::apply(add, fields(key.options));
        return sum;
    }
};

// Least recently used plans go first.
class Cache {
public:
    bool find(const Key& key, Plan& plan) {
        const std::lock_guard lock(mutex_);
        const auto at = places_.find(key);
        if (at == places_.end()) return false;
        order_.splice(order_.begin(), order_, at->second);
        plan = at->second->second;
        ++counts_.found;
        return true;
    }
    void keep(const Key& key, const Plan& plan) {
        const std::lock_guard lock(mutex_);
        ++counts_.made;
        if (places_.contains(key)) return;  // another thread was faster
        order_.emplace_front(key, plan);
        places_.emplace(key, order_.begin());
        if (order_.size() <= kMostPlans) return;
        places_.erase(order_.back().first);
        order_.pop_back();
    }
    CacheCounts counts() {
        const std::lock_guard lock(mutex_);
        counts_.kept = static_cast<std::int64_t>(order_.size());
        return counts_;
    }

private:
    std::mutex mutex_;
    std::list<std::pair<Key, Plan>> order_;
    std::unordered_map<Key, decltype(order_)::iterator, Hash> places_;
    CacheCounts counts_{};
};

// NOTE: never destroyed, so that threads which outlive main() may still call.
Cache& cache() {
    static Cache* const instance = new Cache;
    return *instance;
}

std::int32_t narrow(const char* name, std::int64_t value) {
    if (value != static_cast<std::int32_t>(value)) {
        raise("ValueError",
              std::string("flash_qla: ") + name + " is " + std::to_string(value) + "; it must fit in 32 bits");
    }
    return static_cast<std::int32_t>(value);
}

void need_rank(const char* name, const TensorView& view, int rank, const char* shape) {
    if (view.rank == rank) return;
    raise("ValueError", std::string("flash_qla: ") + name + " has " + std::to_string(view.rank) +
                            " dimensions; its shape must be " + shape);
}

}  // namespace

Problem problem_of(const TensorView& q, const TensorView& v, const TensorView& cu_seqlens, DType out,
                   const Settings& settings) {
    need_rank("q", q, 4, "[B,T,Hk,K]");
    need_rank("v", v, 4, "[B,T,Hv,V]");
    const std::int64_t modes = settings.modes;
    Problem p;
    p.batch = q.shape[0];
    p.tokens = q.shape[1];
    if (cu_seqlens.given()) {
        need_rank("cu_seqlens", cu_seqlens, 1, "[N+1]");
        if (cu_seqlens.shape[0] < 2) {
            raise("ValueError", "flash_qla: cu_seqlens has " + std::to_string(cu_seqlens.shape[0]) +
                                    " entries; it must have N + 1, with one sequence or more");
        }
        p.sequences = cu_seqlens.shape[0] - 1;
    }
    p.heads_k = narrow("the number of key heads", q.shape[2]);
    p.heads_v = narrow("the number of value heads", v.shape[2]);
    p.dim_k = narrow("K", q.shape[3]);
    p.dim_v = narrow("V", v.shape[3]);
    p.io = q.dtype;
    p.out = out;
    p.gate = static_cast<Gate>((modes >> kGateShift) & 3);
    p.beta_mode = (modes & kBetaLogit) ? BetaMode::logit : BetaMode::value;
    p.beta_factor = (modes & kBetaTwice) ? 2.0f : 1.0f;
    p.qk_l2norm = (modes & kL2Norm) != 0;
    p.scale = static_cast<float>(settings.scale);
    p.grouping = (modes & kTiled) ? Grouping::tiled : Grouping::interleaved;
    p.state_layout = (modes & kStateVFirst) ? StateLayout::vk : StateLayout::kv;
    p.pad_rule = (modes & kPadNonPositive) ? PadRule::non_positive : PadRule::negative;
    p.checkpoints = static_cast<Checkpoints>((modes >> kCheckpointShift) & 3);
    p.checkpoint_every = settings.checkpoint_every;
    p.decode_rows = settings.decode_rows;
    p.for_backward = (modes & kForBackward) != 0;
    return p;
}

PlanOptions options_of(const Settings& settings) {
    PlanOptions options;
    options.backend = settings.backend;
    options.threads = narrow("threads", settings.threads);
    options.context_split = narrow("context_split", settings.context_split);
    options.deterministic = (settings.modes & kDeterministic) != 0;
    options.batch_invariant = (settings.modes & kBatchInvariant) != 0;
    return options;
}

Plan cached_plan(const Problem& problem, Device device, const PlanOptions& options) {
    Key key{problem, device, options};
    if (forked.load(std::memory_order_relaxed) && device.type == DeviceType::cpu) key.options.threads = 1;
    Plan plan;
    if (cache().find(key, plan)) return plan;
    Result<Plan> made = Plan::create(problem, device, key.options);
    raise_if_bad(made.status());
    cache().keep(key, made.value());
    return std::move(made).value();
}

CacheCounts cache_counts() { return cache().counts(); }

void after_fork() noexcept { forked.store(true, std::memory_order_relaxed); }

}  // namespace flashqla::python
