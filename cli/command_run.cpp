#include <cstdio>
#include <cstring>
#include <memory>

#include "cases/grammar.hpp"
#include "cases/runner.hpp"
#include "commands.hpp"
#include "safetensors/safetensors.hpp"

namespace flashqla::cli {
namespace {

using cases::HostTensor;

struct RunOptions {
    std::string input, output, pass = "auto", gate = "auto", beta = "value", layout = "kv", group = "interleaved",
                               pad = "neg", checkpoints, backend, state = "auto";
    bool negative = false, l2norm = false, out_f32 = false, no_final = false, deterministic = false,
         batch_invariant = false, no_commit = false;
    double scale = 0, eps = 1e-6;
    int threads = 0, split = 0;
};

class Runner {
public:
    explicit Runner(const RunOptions& options) : o_(options) {}

    Exit run() {
        file_ = safetensors::read(o_.input);
        if (!file_.content.ok()) throw Failure{kWrongInput, file_.content.error};
        choose_pass();
        sizes();
        const Result<Plan> plan = Plan::create(problem_, {}, plan_options());
        if (!plan.ok()) refuse(plan.status());
        if (plan->backend(pass_).empty()) throw Failure{kUnsupported, "this pass was not planned\n" + plan->explain()};
        cases::Scratch scratch(plan->workspace_bytes(pass_));
        Status status;
        switch (pass_) {
            case Pass::forward: status = forward(plan.value(), scratch.workspace()); break;
            case Pass::backward: status = backward(plan.value(), scratch.workspace()); break;
            case Pass::decode: status = decode(plan.value(), scratch.workspace()); break;
        }
        if (!status.ok()) refuse(status);
        std::vector<safetensors::Named> named;
        for (const HostTensor& tensor : results_) named.push_back({tensor.name, tensor.view});
        const std::string error = safetensors::write(o_.output, named, {{"format", "pt"}, {"backend", backend_}});
        if (!error.empty()) throw Failure{kWrongInput, error};
        for (const HostTensor& tensor : results_) {
            std::printf("%-16s %-5s [", tensor.name.c_str(), name_of(tensor.view.dtype));
            for (int i = 0; i < tensor.view.rank; ++i) {
                std::printf("%s%lld", i ? "," : "",
                            static_cast<long long>(tensor.view.shape[static_cast<std::size_t>(i)]));
            }
            std::printf("]\n");
        }
        std::printf("written to %s by backend %s\n", o_.output.c_str(), backend_.c_str());
        return kOk;
    }

private:
    [[noreturn]] static void refuse(const Status& status) { throw Failure{exit_code(status.code()), status.message()}; }

    bool has(const char* name) const { return file_.content.find(name) != nullptr; }

    TensorView view(const char* name) const {
        const safetensors::Entry* entry = file_.content.find(name);
        if (!entry) return {};
        if (entry->dtype == DType::none) {
            throw Failure{kWrongInput, std::string("run: ") + name + " has dtype " + entry->dtype_name +
                                           "; F32, F16, BF16, I32, I64, U8 and BOOL can be used"};
        }
        if (entry->shape.size() > static_cast<std::size_t>(kMaxRank)) {
            throw Failure{kWrongInput, std::string("run: ") + name + " has " + std::to_string(entry->shape.size()) +
                                           " dimensions; at most " + std::to_string(kMaxRank) + " are allowed"};
        }
        return entry->view();
    }
    TensorView need(const char* name, int rank) const {
        const TensorView v = view(name);
        if (!v.given()) throw Failure{kWrongInput, std::string("run: the file has no tensor named ") + name};
        if (v.rank != rank) {
            throw Failure{kWrongInput, std::string("run: ") + name + " has " + std::to_string(v.rank) +
                                           " dimensions; this tensor needs " + std::to_string(rank)};
        }
        return v;
    }

    void choose_pass() {
        if (o_.pass == "forward") pass_ = Pass::forward;
        if (o_.pass == "backward") pass_ = Pass::backward;
        if (o_.pass == "decode") pass_ = Pass::decode;
        if (o_.pass == "auto") {
            pass_ = has("d_o") || has("d_final_state") ? Pass::backward : has("state") ? Pass::decode : Pass::forward;
        }
    }

    void sizes() {
        const TensorView q = need("q", 4), v = need("v", 4);
        need("k", 4);
        Problem& p = problem_;
        p.batch = q.shape[0];
        p.tokens = q.shape[1];
        const auto narrow = [](const char* what, std::int64_t x) {
            if (x > INT32_MAX)
                throw Failure{kWrongInput, std::string("run: ") + what + " is " + std::to_string(x) +
                                               "; at most 2147483647 is allowed"};
            return static_cast<std::int32_t>(x);
        };
        p.heads_k = narrow("Hk, dimension 2 of q,", q.shape[2]);
        p.dim_k = narrow("K, dimension 3 of q,", q.shape[3]);
        p.heads_v = narrow("Hv, dimension 2 of v,", v.shape[2]);
        p.dim_v = narrow("V, dimension 3 of v,", v.shape[3]);
        if (has("cu_seqlens")) p.sequences = need("cu_seqlens", 1).shape[0] - 1;
        p.io = q.dtype;
        p.out = o_.out_f32 ? DType::f32 : DType::none;
        if (o_.gate == "auto") p.gate = has("A_log") ? Gate::raw : has("g") ? Gate::log : Gate::none;
        if (o_.gate == "log") p.gate = Gate::log;
        if (o_.gate == "raw") p.gate = Gate::raw;
        if (o_.gate == "none") p.gate = Gate::none;
        p.beta_mode = o_.beta == "logit" ? BetaMode::logit : BetaMode::value;
        p.beta_factor = o_.negative ? 2.0f : 1.0f;
        p.qk_l2norm = o_.l2norm;
        p.l2norm_eps = static_cast<float>(o_.eps);
        p.scale = static_cast<float>(o_.scale);
        p.grouping = o_.group == "tiled" ? Grouping::tiled : Grouping::interleaved;
        p.state_layout = o_.layout == "vk" ? StateLayout::vk : StateLayout::kv;
        p.pad_rule = o_.pad == "nonpos" ? PadRule::non_positive : PadRule::negative;
        p.for_backward = pass_ == Pass::backward;
        if (o_.checkpoints.empty()) return;
        if (o_.checkpoints == "chunk") {
            p.checkpoints = Checkpoints::chunk_starts;
        } else if (o_.checkpoints == "list") {
            p.checkpoints = Checkpoints::listed;
        } else if (o_.checkpoints.rfind("every:", 0) == 0) {
            p.checkpoints = Checkpoints::every_n;
            p.checkpoint_every = std::atoll(o_.checkpoints.c_str() + 6);
        } else {
            throw Failure{kWrongInput, "run: --checkpoints is '" + o_.checkpoints +
                                           "'; chunk, every:N or list (with a tensor checkpoint_list) is allowed"};
        }
    }

    PlanOptions plan_options() {
        PlanOptions options;
        options.backend = o_.backend;
        options.threads = o_.threads;
        options.context_split = o_.split;
        options.deterministic = o_.deterministic;
        options.batch_invariant = o_.batch_invariant;
        return options;
    }

    std::int64_t count() const { return problem_.sequences > 0 ? problem_.sequences : problem_.batch; }
    DType state_type() const {
        if (o_.state == "f32") return DType::f32;
        if (o_.state == "bf16") return DType::bf16;
        if (o_.state == "f16") return DType::f16;
        for (const char* name : {"state", "initial_state"}) {
            if (has(name)) return file_.content.find(name)->dtype;
        }
        return DType::f32;
    }

    TensorView result(const char* name, DType dtype, const std::vector<std::int64_t>& shape) {
        results_.push_back(cases::make_tensor(name, dtype, shape));
        // Rows that no sequence writes (padding slots, spare checkpoints) are zero in the file.
        std::memset(results_.back().view.data, 0, static_cast<std::size_t>(results_.back().size()) * size_of(dtype));
        return results_.back().view;
    }
    TensorView states(const char* name, std::int64_t rows) {
        const bool kv = problem_.state_layout == StateLayout::kv;
        return result(
            name, state_type(),
            {rows, problem_.heads_v, kv ? problem_.dim_k : problem_.dim_v, kv ? problem_.dim_v : problem_.dim_k});
    }
    // A result that starts as a copy of an input: pools are updated in place, and inputs are never written.
    TensorView copy(const char* name, const TensorView& from) {
        std::vector<std::int64_t> shape(from.shape.begin(), from.shape.begin() + from.rank);
        const TensorView to = result(name, from.dtype, shape);
        std::memcpy(to.data, from.data, static_cast<std::size_t>(results_.back().size()) * size_of(from.dtype));
        return to;
    }
    TensorView like(const char* name, const TensorView& from, DType dtype) {
        return result(name, dtype, {from.shape.begin(), from.shape.begin() + from.rank});
    }

    template <class Args>
    void inputs(const Plan& plan, Args& args) {
        backend_ = plan.backend(pass_);
        args.q = view("q");
        args.k = view("k");
        args.v = view("v");
        args.g = problem_.gate == Gate::none ? TensorView{} : view("g");
        args.beta = view("beta");
        if (problem_.gate == Gate::raw) {
            args.A_log = view("A_log");
            args.dt_bias = view("dt_bias");
        }
        args.cu_seqlens = view("cu_seqlens");
    }
    TensorView make_o(const Plan& plan) {
        return result("o", plan.problem().out, {problem_.batch, problem_.tokens, problem_.heads_v, problem_.dim_v});
    }

    Status forward(const Plan& plan, Workspace workspace) {
        ForwardArgs args;
        inputs(plan, args);
        args.o = make_o(plan);
        args.initial_state = view("initial_state");
        args.state_indices = view("state_indices");
        args.state_indices_out = view("state_indices_out");
        args.has_initial_state = view("has_initial_state");
        if (!o_.no_final) {
            if (args.state_indices.given()) {
                // A pool: the result is the pool with the new states in it.
                if (!args.initial_state.given()) {
                    throw Failure{kWrongInput, "run: state_indices needs the pool as a tensor named initial_state"};
                }
                args.final_state = args.initial_state = copy("final_state", args.initial_state);
            } else {
                args.final_state = states("final_state", count());
            }
        }
        if (problem_.checkpoints == Checkpoints::listed) {
            args.checkpoint_list = need("checkpoint_list", 2);
            args.checkpoints = states("checkpoints", args.checkpoint_list.shape[0]);
        } else if (problem_.checkpoints != Checkpoints::none) {
            args.checkpoints = states("checkpoints", plan.checkpoint_rows());
        }
        return flashqla::forward(plan, args, workspace);
    }

    Status backward(const Plan& plan, Workspace workspace) {
        BackwardArgs args;
        inputs(plan, args);
        args.initial_state = view("initial_state");
        args.d_o = view("d_o");
        args.d_final_state = view("d_final_state");
        args.d_q = like("d_q", args.q, o_.out_f32 ? DType::f32 : args.q.dtype);
        args.d_k = like("d_k", args.k, o_.out_f32 ? DType::f32 : args.k.dtype);
        args.d_v = like("d_v", args.v, o_.out_f32 ? DType::f32 : args.v.dtype);
        if (args.g.given()) args.d_g = like("d_g", args.g, DType::f32);
        if (args.beta.given()) args.d_beta = like("d_beta", args.beta, DType::f32);
        if (args.A_log.given()) args.d_A_log = like("d_A_log", args.A_log, DType::f32);
        if (args.dt_bias.given()) args.d_dt_bias = like("d_dt_bias", args.dt_bias, DType::f32);
        if (args.initial_state.given()) {
            args.d_initial_state = like("d_initial_state", args.initial_state, DType::f32);
        }
        return flashqla::backward(plan, args, workspace);
    }

    Status decode(const Plan& plan, Workspace workspace) {
        DecodeArgs args;
        inputs(plan, args);
        args.o = make_o(plan);
        args.state = copy("state", need("state", 4));
        args.state_indices = view("state_indices");
        args.state_indices_out = view("state_indices_out");
        args.has_initial_state = view("has_initial_state");
        args.num_accepted = view("num_accepted");
        args.commit_state = !o_.no_commit;
        if (has("intermediate_states"))
            args.intermediate_states = copy("intermediate_states", view("intermediate_states"));
        args.intermediate_indices = view("intermediate_indices");
        args.parent_tokens = view("parent_tokens");
        return flashqla::decode(plan, args, workspace);
    }

    const RunOptions& o_;
    safetensors::File file_;
    Pass pass_ = Pass::forward;
    Problem problem_;
    std::string backend_;
    std::vector<HostTensor> results_;
};

}  // namespace

Command add_run(CLI::App& app) {
    auto o = std::make_shared<RunOptions>();
    app.add_option("input", o->input,
                   "File with q, k, v and what else there is of: g, beta, A_log, dt_bias, cu_seqlens, initial_state, "
                   "state_indices, state_indices_out, has_initial_state, checkpoint_list; for backward d_o, "
                   "d_final_state; for decode state, num_accepted, intermediate_states, intermediate_indices, "
                   "parent_tokens")
        ->required()
        ->type_name("IN.safetensors");
    app.add_option("-o,--output", o->output, "File for the results")->required()->type_name("OUT.safetensors");
    const auto choice = [&](const char* name, std::string& value, const char* help, std::vector<std::string> names) {
        app.add_option(name, value, help)->check(CLI::IsMember(std::move(names)))->capture_default_str();
    };
    choice("--pass", o->pass, "auto: backward with d_o or d_final_state, decode with state, else forward",
           {"auto", "forward", "backward", "decode"});
    choice("--gate", o->gate, "auto: raw with A_log, log with g, else none", {"auto", "log", "raw", "none"});
    choice("--beta", o->beta, "How beta is understood", {"value", "logit"});
    choice("--layout", o->layout, "State layout", {"kv", "vk"});
    choice("--group", o->group, "Which key head a value head reads", {"interleaved", "tiled"});
    choice("--pad", o->pad, "Slots that mark padding rows", {"neg", "nonpos"});
    choice("--state", o->state, "Type of new states; auto: as the given ones, else f32",
           {"auto", "f32", "bf16", "f16"});
    app.add_option("--checkpoints", o->checkpoints, "chunk, every:N, or list")->type_name("WHICH");
    app.add_flag("--neg", o->negative, "beta_factor 2");
    app.add_flag("--l2norm", o->l2norm, "Normalise the rows of q and k");
    app.add_option("--eps", o->eps, "Of the normalisation")->capture_default_str();
    app.add_option("--scale", o->scale, "Scale of o; 0 = K^-1/2")->capture_default_str();
    app.add_flag("--out-f32", o->out_f32, "o and the gradients in f32");
    app.add_flag("--no-final", o->no_final, "No final state");
    app.add_flag("--no-commit", o->no_commit, "decode: leave the pool as it is");
    app.add_option("--backend", o->backend, "Backend")->type_name("NAME");
    app.add_option("--threads", o->threads, "Threads")->check(CLI::Range(1, 4096))->type_name("N");
    app.add_option("--split", o->split, "Segments a sequence is cut into")->check(CLI::Range(1, 4096))->type_name("N");
    app.add_flag("--deterministic", o->deterministic, "The same bits for any number of threads");
    app.add_flag("--batch-invariant", o->batch_invariant, "A sequence's bits do not depend on its neighbours");
    return [o] { return Runner(*o).run(); };
}

}  // namespace flashqla::cli
