// What a case asks for beyond the values: the same bits again, alone and in company, in one piece and in two.

#include <algorithm>
#include <numeric>

#include "cases/numbers.hpp"
#include "cases/runner.hpp"

namespace flashqla::cases {
namespace {

using Faults = std::vector<std::string>;

Case without_properties(Case c) {
    c.same_packed = c.alone = c.threads_bitwise = c.decode_equals_prefill = false;
    c.repeat = c.relens = c.steps = c.split_prefill = 0;
    c.expect = Expect::ok;
    return c;
}

void note(Faults& faults, const std::string& sentence) {
    if (!sentence.empty()) faults.push_back(sentence);
}

bool failed(Faults& faults, const char* property, const Execution& x) {
    if (!x.status.ok()) note(faults, std::string(property) + ": the call was refused: " + x.status.message());
    for (const std::string& fault : x.faults) note(faults, std::string(property) + ": " + fault);
    return !x.status.ok();
}

// Two results of the same arithmetic in another order.
double allowed(const Case& c, const Instance& instance, const std::string& output) {
    const HostTensor* tensor = instance.find(output);
    const std::int64_t heads =
        std::max<std::int64_t>(1, tensor->view.shape[static_cast<std::size_t>(tensor->head_axis)]);
    return 2 * tolerance(c, output, tensor->view.dtype, tensor->size() / heads).whole;
}

void repeat(Faults& faults, const Case& c, const Execution& first) {
    const Case plain = without_properties(c);
    Instance again = make_instance(plain);
    const Result<Plan> plan = plan_of(plain);
    if (!plan.ok()) return note(faults, "repeat: " + plan.status().message());
    Scratch scratch(plan->workspace_bytes(c.pass), c.device);
    for (std::int64_t i = 1; i < c.repeat && faults.empty(); ++i) {
        again.restore();
        scratch.poison();
        const Status status = call(plain, plan.value(), again, scratch.workspace());
        if (!status.ok()) return note(faults, "repeat: " + status.message());
        for (const std::string& name : again.outputs) {
            note(faults, bit_difference("repeat: run " + std::to_string(i + 1) + ", " + name,
                                        values_of(*again.find(name)), values_of(*first.instance.find(name))));
        }
    }
}

void threads_bitwise(Faults& faults, const Case& c, const Execution& first) {
    for (const int threads : {1, 2, 3}) {
        Case other = without_properties(c);
        other.threads = threads;
        const Execution x = execute(other);
        if (failed(faults, "threads-bitwise", x)) return;
        for (const std::string& name : x.instance.outputs) {
            note(faults, bit_difference("threads-bitwise: " + std::to_string(threads) + " threads, " + name,
                                        values_of(*x.instance.find(name)), values_of(*first.instance.find(name))));
        }
    }
}

// Every sequence once more by itself: packed as one sequence (`packed`) or as a batch row.
void alone(Faults& faults, const Case& c, const Execution& first, bool packed) {
    const char* property = packed ? "alone" : "same=packed";
    for (std::int64_t n = 0; n < c.sequences() && faults.empty(); ++n) {
        const auto i = static_cast<std::size_t>(n);
        Case single = without_properties(c);
        single.batch = 1;
        single.tokens = c.length(n);
        single.lens.clear();
        if (packed && c.packed()) single.lens = {single.tokens};
        single.decode_rows = 0;
        single.checkpoints = Checkpoints::none;
        single.checkpoint_every = 0;
        single.pool = 0;
        single.slots.clear();
        single.out_slots.clear();
        if (c.pool > 0) continue;  // pools have their own cases
        if (!c.has_initial.empty()) single.has_initial = {c.has_initial[i]};
        const Execution x = execute(single, {.oracle = false, .origins = {{n, 0}}, .start = {}});
        if (failed(faults, property, x)) return;
        for (const std::string& name : x.instance.outputs) {
            const std::vector<float> company = values_of_sequence(c, first.instance, name, n);
            const std::vector<float> itself = values_of_sequence(single, x.instance, name, 0);
            const std::string what = std::string(property) + ": sequence " + std::to_string(n) + ", " + name;
            note(faults, c.batch_invariant ? bit_difference(what, company, itself)
                                           : difference(what, company, itself, allowed(c, first.instance, name)));
        }
    }
}

void split_prefill(Faults& faults, const Case& c, const Execution& first) {
    const std::int64_t cut = c.split_prefill < 0 ? c.tokens / 2 : std::min(c.split_prefill, c.tokens);
    Case piece = without_properties(c);
    piece.final = true;
    piece.in_place = false;
    piece.checkpoints = Checkpoints::none;
    piece.checkpoint_every = 0;
    piece.tokens = cut;
    const Execution head = execute(piece);
    if (failed(faults, "split-prefill", head)) return;
    Setup rest;
    for (std::int64_t n = 0; n < c.batch; ++n) {
        rest.origins.push_back({n, cut});
        rest.start.push_back({});
        // Into [Hv,K,V] order, whatever the layout.
        const std::vector<float> state = values_of_sequence(piece, head.instance, "final_state", n);
        std::vector<float>& start = rest.start.back();
        start.resize(state.size());
        const auto keys = static_cast<std::size_t>(c.dim_k), values = static_cast<std::size_t>(c.dim_v);
        for (std::size_t h = 0; h < static_cast<std::size_t>(c.heads_v); ++h) {
            for (std::size_t k = 0; k < keys; ++k) {
                for (std::size_t v = 0; v < values; ++v) {
                    const std::size_t from = c.layout == StateLayout::kv ? k * values + v : v * keys + k;
                    start[(h * keys + k) * values + v] = state[h * keys * values + from];
                }
            }
        }
    }
    piece.tokens = c.tokens - cut;
    piece.initial = true;
    piece.has_initial.clear();
    const Execution tail = execute(piece, rest);
    if (failed(faults, "split-prefill", tail)) return;
    for (std::int64_t n = 0; n < c.batch; ++n) {
        std::vector<float> o = values_of_sequence(piece, head.instance, "o", n);
        const std::vector<float> second = values_of_sequence(piece, tail.instance, "o", n);
        o.insert(o.end(), second.begin(), second.end());
        note(faults, difference("split-prefill: o", o, values_of_sequence(c, first.instance, "o", n),
                                allowed(c, first.instance, "o")));
        if (c.final) {
            note(faults,
                 difference("split-prefill: final_state", values_of_sequence(piece, tail.instance, "final_state", n),
                            values_of_sequence(c, first.instance, "final_state", n),
                            allowed(c, first.instance, "final_state")));
        }
    }
}

// `steps` decode calls of `tokens` tokens each, on one pool. o of every step, by sequence.
bool decode_steps(Faults& faults, const char* property, const Case& step, std::int64_t steps,
                  std::vector<std::vector<float>>& o, Instance& last) {
    const Result<Plan> plan = plan_of(step);
    if (!plan.ok()) {
        note(faults, std::string(property) + ": " + plan.status().message());
        return false;
    }
    Scratch scratch(plan->workspace_bytes(Pass::decode), step.device);
    o.assign(static_cast<std::size_t>(step.batch), {});
    for (std::int64_t i = 0; i < steps; ++i) {
        Setup setup;
        for (std::int64_t n = 0; n < step.batch; ++n) setup.origins.push_back({n, i * step.tokens});
        // The tensors of this step, but the pool of the step before.
        setup.without_states = i > 0;
        Instance now = make_instance(step, setup);
        if (i > 0) {
            now.decode.state = last.decode.state;
            now.decode.has_initial_state = {};
        }
        scratch.poison();
        const Status status = call(step, plan.value(), now, scratch.workspace());
        if (!status.ok()) {
            note(faults, std::string(property) + ": " + status.message());
            return false;
        }
        for (std::int64_t n = 0; n < step.batch; ++n) {
            const std::vector<float> row = values_of_sequence(step, now, "o", n);
            auto& all = o[static_cast<std::size_t>(n)];
            all.insert(all.end(), row.begin(), row.end());
        }
        if (i == 0) last = std::move(now);
    }
    return true;
}

Case decode_case(const Case& c) {
    Case step = without_properties(c);
    step.pass = Pass::decode;
    step.checkpoints = Checkpoints::none;
    step.checkpoint_every = 0;
    step.in_place = false;
    step.final = true;
    step.threads = c.threads;
    step.split = 0;
    return step;
}

void decode_equals_prefill(Faults& faults, const Case& c, const Execution& first) {
    Case step = decode_case(c);
    step.tokens = 1;
    std::vector<std::vector<float>> o;
    Instance last;
    if (!decode_steps(faults, "decode-equals-prefill", step, c.tokens, o, last)) return;
    // A 16-bit state is rounded after every token here and once in the forward call.
    const double factor = c.state == DType::f32 ? 1.0 : 8.0;
    for (std::int64_t n = 0; n < c.batch; ++n) {
        note(faults,
             difference("decode-equals-prefill: o", o[static_cast<std::size_t>(n)],
                        values_of_sequence(c, first.instance, "o", n), factor * allowed(c, first.instance, "o")));
        if (!c.final) continue;
        note(faults, difference("decode-equals-prefill: final_state", values_of_sequence(step, last, "state", n),
                                values_of_sequence(c, first.instance, "final_state", n),
                                factor * allowed(c, first.instance, "final_state")));
    }
}

void steps(Faults& faults, const Case& c) {
    Case step = decode_case(c);
    std::vector<std::vector<float>> o;
    Instance last;
    if (!decode_steps(faults, "steps", step, c.steps, o, last)) return;
    Case all = step;
    all.pass = Pass::forward;
    all.tokens = c.tokens * c.steps;
    all.initial = c.initial;
    const std::shared_ptr<const Oracle> oracle = ask_oracle(all);
    if (!oracle->status.ok()) return note(faults, "steps: the oracle refused: " + oracle->status.message());
    const auto part = [&](const char* name, std::int64_t n) {
        const std::vector<float>& values = oracle->outputs.at(name).values;
        const auto size = static_cast<std::ptrdiff_t>(values.size()) / c.batch;
        return std::vector<float>(values.begin() + n * size, values.begin() + (n + 1) * size);
    };
    const double factor = c.state == DType::f32 ? 1.0 : 8.0;
    for (std::int64_t n = 0; n < c.batch; ++n) {
        const std::vector<float> exact = part("o", n), &ours = o[static_cast<std::size_t>(n)];
        const double limit = factor * allowed(step, last, "o");
        note(faults, difference("steps: o", ours, exact, limit));
        // The last tenth by itself: errors must not grow with the steps.
        const auto tenth = static_cast<std::ptrdiff_t>(exact.size() / 10);
        note(faults, difference("steps: o of the last tenth", {ours.end() - tenth, ours.end()},
                                {exact.end() - tenth, exact.end()}, limit));
        note(faults, difference("steps: state", values_of_sequence(step, last, "state", n), part("final_state", n),
                                factor * allowed(step, last, "state")));
    }
}

// One plan, one set of tensors; cu_seqlens is edited in place before each call.
void relens(Faults& faults, const Case& c) {
    const Case plain = without_properties(c);
    Instance ours = make_instance(plain), exact = make_instance(plain, {.oracle = true, .origins = {}, .start = {}});
    const Result<Plan> plan = plan_of(plain);
    const Result<Plan> oracle = Plan::create(exact.problem, {}, {.backend = "reference"});
    if (!plan.ok() || !oracle.ok())
        return note(faults, "relens: " + plan.status().message() + oracle.status().message());
    Scratch scratch(plan->workspace_bytes(c.pass), c.device), oracle_scratch(oracle->workspace_bytes(c.pass));
    const std::int64_t total = std::accumulate(c.lens.begin(), c.lens.end(), std::int64_t{0});
    std::vector<bool> padding_rows;
    for (const Row& row : ours.rows) padding_rows.push_back(row.sequence < 0);
    for (std::int64_t i = 0; i < c.relens && faults.empty(); ++i) {
        std::vector<std::int64_t> offsets{0, total};
        const Draw draw(c.seed, 99, i);
        while (offsets.size() < c.lens.size() + 1) {
            offsets.push_back(static_cast<std::int64_t>(draw.bits(static_cast<std::int64_t>(offsets.size())) %
                                                        static_cast<std::uint64_t>(total + 1)));
        }
        std::sort(offsets.begin(), offsets.end());
        ours.restore();
        exact.restore();
        for (const Instance* instance : {&ours, &exact}) {
            const TensorView& view = instance->forward.cu_seqlens;
            for (std::size_t n = 0; n < offsets.size(); ++n) {
                store(view.data, view.dtype, static_cast<std::int64_t>(n), static_cast<double>(offsets[n]));
            }
        }
        const Status a = call(plain, plan.value(), ours, scratch.workspace());
        const Status b = call(plain, oracle.value(), exact, oracle_scratch.workspace());
        if (!a.ok() || !b.ok()) return note(faults, "relens: " + a.message() + b.message());
        for (const std::string& name : ours.outputs) {
            const OutputError error = compare(plain, *ours.find(name), {values_of(*exact.find(name))}, padding_rows);
            if (!error.passed()) {
                note(faults, "relens: call " + std::to_string(i + 1) + ": " + name + " is wrong, relative L2 error " +
                                 std::to_string(error.whole.rel_l2));
            }
        }
    }
}

}  // namespace

std::vector<std::string> check_properties(const Case& c, const Execution& first) {
    Faults faults;
    if (c.repeat > 1) repeat(faults, c, first);
    if (c.threads_bitwise) threads_bitwise(faults, c, first);
    if (c.alone) alone(faults, c, first, true);
    if (c.same_packed) alone(faults, c, first, false);
    if (c.split_prefill) split_prefill(faults, c, first);
    if (c.decode_equals_prefill) decode_equals_prefill(faults, c, first);
    if (c.steps) steps(faults, c);
    if (c.relens) relens(faults, c);
    return faults;
}

}  // namespace flashqla::cases
