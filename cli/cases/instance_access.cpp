#include <algorithm>

#include "cases/instance.hpp"
#include "cases/numbers.hpp"

namespace flashqla::cases {

std::int64_t Case::tokens_per_row() const { return packed() ? *std::max_element(lens.begin(), lens.end()) : tokens; }

Problem problem_of(const Case& c) {
    Problem p;
    p.batch = c.batch;
    p.tokens = c.tokens;
    p.sequences = c.packed() ? c.sequences() : 0;
    p.heads_k = c.heads_k;
    p.heads_v = c.heads_v;
    p.dim_k = c.dim_k;
    p.dim_v = c.dim_v;
    p.io = c.io;
    p.out = c.out;
    p.gate = c.gate;
    p.beta_mode = c.beta_mode;
    p.beta_factor = c.negative ? 2.0f : 1.0f;
    p.qk_l2norm = c.l2norm;
    p.scale = static_cast<float>(c.scale);
    p.grouping = c.grouping;
    p.state_layout = c.layout;
    p.pad_rule = c.pad;
    p.checkpoints = c.checkpoints;
    p.checkpoint_every = c.checkpoint_every;
    p.decode_rows = c.decode_rows;
    p.for_backward = c.pass == Pass::backward;
    return p;
}

PlanOptions options_of(const Case& c) {
    PlanOptions o;
    o.backend = c.backend;
    o.threads = c.threads;
    o.context_split = c.split;
    o.deterministic = c.deterministic;
    o.batch_invariant = c.batch_invariant;
    return o;
}

Result<Plan> plan_of(const Case& c) { return Plan::create(problem_of(c), c.device, options_of(c)); }

const HostTensor* Instance::find(const std::string& name) const {
    const auto at = std::find_if(tensors.begin(), tensors.end(), [&](const HostTensor& t) { return t.name == name; });
    return at == tensors.end() ? nullptr : &*at;
}

bool Instance::is_output(const std::string& name) const {
    return std::find(outputs.begin(), outputs.end(), name) != outputs.end();
}

void Instance::take_snapshots() {
    for (HostTensor& tensor : tensors) tensor.storage->take_snapshot();
}

void Instance::restore() {
    for (HostTensor& tensor : tensors) tensor.storage->restore();
}

std::vector<std::string> Instance::forbidden_changes() const {
    std::vector<std::string> sentences;
    for (const HostTensor& tensor : tensors) {
        std::int64_t element = 0;
        if (!tensor.storage->first_change(element)) continue;
        const std::string where = "element " + std::to_string(element) + " of the memory of " + tensor.name;
        sentences.push_back(where + (is_output(tensor.name)
                                         ? " was written, but it is no part of the result (canary, gap or other slot)"
                                         : " was written, but it is an input"));
    }
    return sentences;
}

std::int64_t Instance::bytes() const {
    std::vector<const Storage*> seen;
    std::int64_t total = 0;
    for (const HostTensor& tensor : tensors) {
        if (std::find(seen.begin(), seen.end(), tensor.storage.get()) != seen.end()) continue;
        seen.push_back(tensor.storage.get());
        total += tensor.storage->bytes();
    }
    return total;
}

std::vector<float> values_of_sequence(const Case& c, const Instance& instance, const std::string& output,
                                      std::int64_t n) {
    std::vector<float> values;
    const HostTensor* tensor = instance.find(output);
    if (!tensor || tensor->view.rank < 3) return values;
    TensorView view = tensor->view;
    std::int64_t begin = 0;
    if (tensor->by_token && c.packed()) {
        std::int64_t first = 0;
        for (std::int64_t i = 0; i < n; ++i) first += c.length(i);
        view.shape[1] = c.length(n);
        begin = first * view.stride[1];
    } else {
        view.shape[0] = 1;
        begin = n * view.stride[0];
    }
    for_each(view, [&](const std::int64_t*, std::int64_t offset) {
        values.push_back(static_cast<float>(load(view.data, view.dtype, begin + offset)));
    });
    return values;
}

}  // namespace flashqla::cases
