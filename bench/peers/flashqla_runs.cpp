#include "flashqla_runs.hpp"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

namespace flashqla::bench {
namespace {

std::uint16_t to_bf16(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float from_bf16(std::uint16_t x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16); }

// Page-aligned memory of one tensor.
class Buffer {
public:
    Buffer() = default;
    Buffer(DType dtype, std::int64_t count) : dtype_(dtype), count_(count) {
        allocate(static_cast<std::size_t>(count) * size_of(dtype));
    }
    Buffer(DType dtype, const float* values, std::int64_t count) : Buffer(dtype, count) { assign(values); }

    static Buffer raw(std::size_t bytes) {
        Buffer buffer;
        buffer.allocate(bytes);
        return buffer;
    }

    void* data() const { return data_.get(); }
    DType dtype() const { return dtype_; }
    TensorView view(std::initializer_list<std::int64_t> shape) const { return tensor(data(), dtype_, shape); }

    void assign(const float* values) {
        if (dtype_ == DType::f32) {
            std::copy_n(values, count_, static_cast<float*>(data()));
        } else {
            std::transform(values, values + count_, static_cast<std::uint16_t*>(data()), to_bf16);
        }
    }

    void copy_to(float* values, std::int64_t count) const {
        if (dtype_ == DType::f32) {
            std::copy_n(static_cast<const float*>(data()), count, values);
        } else {
            std::transform(static_cast<const std::uint16_t*>(data()), static_cast<const std::uint16_t*>(data()) + count,
                           values, from_bf16);
        }
    }

    std::vector<float> values() const {
        std::vector<float> result(static_cast<std::size_t>(count_));
        copy_to(result.data(), count_);
        return result;
    }

private:
    struct Free {
        void operator()(void* data) const { std::free(data); }
    };

    void allocate(std::size_t bytes) {
        constexpr std::size_t kPage = 4096;
        const std::size_t padded = std::max(kPage, (bytes + kPage - 1) / kPage * kPage);
        data_.reset(std::aligned_alloc(kPage, padded));
        if (data_ == nullptr) throw std::bad_alloc();
        std::memset(data_.get(), 0, padded);
    }

    std::unique_ptr<void, Free> data_;
    DType dtype_ = DType::none;
    std::int64_t count_ = 0;
};

Problem to_problem(const PeerCase& p, Precision precision) {
    Problem problem;
    problem.tokens = p.T;
    problem.heads_k = static_cast<std::int32_t>(p.heads_k);
    problem.heads_v = static_cast<std::int32_t>(p.heads_v);
    problem.dim_k = problem.dim_v = static_cast<std::int32_t>(p.dim);
    problem.io = precision.io;
    return problem;
}

Result<Plan> make_plan(Problem problem, int threads, const std::string& backend = "") {
    PlanOptions options;
    options.backend = backend;
    options.threads = threads;
    return Plan::create(problem, Device{}, options);
}

// What forward, decode and backward share.
struct Inputs {
    Inputs(const PeerCase& p, Precision precision)
        : q(precision.io, p.q, p.T * p.heads_k * p.dim),
          k(precision.io, p.k, p.T * p.heads_k * p.dim),
          v(precision.io, p.v, p.T * p.heads_v * p.dim),
          g(DType::f32, p.g, p.T * p.heads_v),
          beta(DType::f32, p.beta, p.T * p.heads_v),
          state(precision.state, p.state, p.states * p.heads_v * p.dim * p.dim),
          o(precision.io, p.T * p.heads_v * p.dim) {}

    template <class Args>
    void fill(Args& args, const PeerCase& p) const {
        args.q = q.view({1, p.T, p.heads_k, p.dim});
        args.k = k.view({1, p.T, p.heads_k, p.dim});
        args.v = v.view({1, p.T, p.heads_v, p.dim});
        args.g = g.view({1, p.T, p.heads_v});
        args.beta = beta.view({1, p.T, p.heads_v});
    }

    Buffer q, k, v, g, beta, state, o;
};

class ForwardRun final : public PeerRun {
public:
    ForwardRun(const PeerCase& problem, Precision precision)
        : p_(problem),
          plan_(check(make_plan(to_problem(problem, precision), problem.threads))),
          in_(problem, precision),
          new_state_(precision.state, problem.heads_v * problem.dim * problem.dim),
          workspace_(Buffer::raw(plan_.workspace_bytes(Pass::forward))) {
        in_.fill(args_, p_);
        args_.initial_state = in_.state.view({1, p_.heads_v, p_.dim, p_.dim});
        args_.final_state = new_state_.view({1, p_.heads_v, p_.dim, p_.dim});
        args_.o = in_.o.view({1, p_.T, p_.heads_v, p_.dim});
    }

    void run(std::int64_t) override {
        check(forward(plan_, args_, {workspace_.data(), plan_.workspace_bytes(Pass::forward)}));
    }

    void fetch() override {
        run(0);
        in_.o.copy_to(p_.o, p_.T * p_.heads_v * p_.dim);
        new_state_.copy_to(p_.final_state, p_.heads_v * p_.dim * p_.dim);
    }

private:
    PeerCase p_;
    Plan plan_;
    Inputs in_;
    Buffer new_state_, workspace_;
    ForwardArgs args_;
};

class DecodeRun final : public PeerRun {
public:
    DecodeRun(const PeerCase& problem, Precision precision)
        : p_(problem),
          plan_(check(make_plan(to_problem(problem, precision), problem.threads))),
          in_(problem, precision),
          workspace_(Buffer::raw(plan_.workspace_bytes(Pass::decode))) {
        in_.fill(args_, p_);
        args_.state = in_.state.view({p_.states, p_.heads_v, p_.dim, p_.dim});
        args_.state_indices = tensor(&slot_, DType::i32, {1});
        args_.o = in_.o.view({1, p_.T, p_.heads_v, p_.dim});
    }

    void run(std::int64_t slot) override {
        slot_ = static_cast<std::int32_t>(slot);
        check(decode(plan_, args_, {workspace_.data(), plan_.workspace_bytes(Pass::decode)}));
    }

    void fetch() override {
        in_.state.assign(p_.state);
        run(0);
        in_.o.copy_to(p_.o, p_.T * p_.heads_v * p_.dim);
        in_.state.copy_to(p_.final_state, p_.heads_v * p_.dim * p_.dim);
        in_.state.assign(p_.state);
    }

private:
    PeerCase p_;
    Plan plan_;
    Inputs in_;
    Buffer workspace_;
    std::int32_t slot_ = 0;
    DecodeArgs args_;
};

class Training final : public TrainingStep {
public:
    Training(const PeerCase& problem, Precision precision, const float* d_o, const std::string& backend)
        : p_(problem),
          plan_(check(make_plan(with_backward(to_problem(problem, precision)), problem.threads, backend))),
          in_(problem, precision),
          d_o_(precision.io, d_o, problem.T * problem.heads_v * problem.dim),
          d_q_(precision.io, problem.T * problem.heads_k * problem.dim),
          d_k_(precision.io, problem.T * problem.heads_k * problem.dim),
          d_v_(precision.io, problem.T * problem.heads_v * problem.dim),
          d_g_(DType::f32, problem.T * problem.heads_v),
          d_beta_(DType::f32, problem.T * problem.heads_v),
          d_state_(DType::f32, problem.heads_v * problem.dim * problem.dim),
          bytes_(std::max(plan_.workspace_bytes(Pass::forward), plan_.workspace_bytes(Pass::backward))),
          workspace_(Buffer::raw(bytes_)) {
        in_.fill(forward_, p_);
        forward_.initial_state = in_.state.view({1, p_.heads_v, p_.dim, p_.dim});
        forward_.o = in_.o.view({1, p_.T, p_.heads_v, p_.dim});

        in_.fill(backward_, p_);
        backward_.initial_state = forward_.initial_state;
        backward_.d_o = d_o_.view({1, p_.T, p_.heads_v, p_.dim});
        backward_.d_q = d_q_.view({1, p_.T, p_.heads_k, p_.dim});
        backward_.d_k = d_k_.view({1, p_.T, p_.heads_k, p_.dim});
        backward_.d_v = d_v_.view({1, p_.T, p_.heads_v, p_.dim});
        backward_.d_g = d_g_.view({1, p_.T, p_.heads_v});
        backward_.d_beta = d_beta_.view({1, p_.T, p_.heads_v});
        backward_.d_initial_state = d_state_.view({1, p_.heads_v, p_.dim, p_.dim});
    }

    void forward() override { check(flashqla::forward(plan_, forward_, {workspace_.data(), bytes_})); }
    void backward() override { check(flashqla::backward(plan_, backward_, {workspace_.data(), bytes_})); }

    std::vector<std::vector<float>> gradients() const override {
        return {d_q_.values(), d_k_.values(), d_v_.values(), d_g_.values(), d_beta_.values(), d_state_.values()};
    }

private:
    static Problem with_backward(Problem problem) {
        problem.for_backward = true;
        return problem;
    }

    PeerCase p_;
    Plan plan_;
    Inputs in_;
    Buffer d_o_, d_q_, d_k_, d_v_, d_g_, d_beta_, d_state_;
    std::size_t bytes_;
    Buffer workspace_;
    ForwardArgs forward_;
    BackwardArgs backward_;
};

}  // namespace

float rounded(float x, DType dtype) { return dtype == DType::bf16 ? from_bf16(to_bf16(x)) : x; }

std::unique_ptr<PeerRun> prepare_forward(const PeerCase& problem, Precision precision) {
    return std::make_unique<ForwardRun>(problem, precision);
}

std::unique_ptr<PeerRun> prepare_decode(const PeerCase& problem, Precision precision) {
    return std::make_unique<DecodeRun>(problem, precision);
}

std::unique_ptr<TrainingStep> prepare_training(const PeerCase& problem, Precision precision, const float* d_o,
                                               const std::string& backend) {
    return std::make_unique<Training>(problem, precision, d_o, backend);
}

std::string serving_backend(const PeerCase& problem, Precision precision, Pass pass) {
    Problem request = to_problem(problem, precision);
    request.for_backward = pass == Pass::backward;
    Result<Plan> plan = make_plan(request, problem.threads);
    return plan.ok() ? std::string(plan->backend(pass)) : std::string();
}

}  // namespace flashqla::bench
