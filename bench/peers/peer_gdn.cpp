#include "peer_gdn.hpp"

#include <dlfcn.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

namespace flashqla::bench {
namespace {

class SharedLibrary {
public:
    explicit SharedLibrary(const std::string& path)
        : handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)), path_(path) {
        if (handle_ == nullptr) {
            throw std::runtime_error("cannot load the peer library: " + std::string(dlerror()));
        }
    }
    SharedLibrary(const SharedLibrary&) = delete;
    SharedLibrary& operator=(const SharedLibrary&) = delete;
    // Never closed: an OpenMP runtime that the library brought in may still own threads when main returns.

    template <class Function>
    void find(const char* symbol, Function*& function) const {
        function = reinterpret_cast<Function*>(dlsym(handle_, symbol));
        if (function == nullptr) {
            throw std::runtime_error(path_ + " does not export " + symbol);
        }
    }

private:
    void* handle_;
    std::string path_;
};

// Cache-line aligned floats: a peer should not lose time to an unlucky malloc.
class Floats {
public:
    explicit Floats(int64_t count = 0) {
        if (count > 0) {
            const std::size_t bytes = (static_cast<std::size_t>(count) * sizeof(float) + 4095) / 4096 * 4096;
            data_ = static_cast<float*>(std::aligned_alloc(4096, bytes));
            if (data_ == nullptr) {
                throw std::bad_alloc();
            }
            bytes_ = bytes;
            std::memset(data_, 0, bytes);
        }
    }
    Floats(const Floats&) = delete;
    Floats& operator=(const Floats&) = delete;
    ~Floats() { std::free(data_); }

    float* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }
    float& operator[](int64_t i) const { return data_[i]; }

private:
    float* data_ = nullptr;
    std::size_t bytes_ = 0;
};

// ---------------------------------------------------------------------------------------------------- ggml

// Only opaque pointers cross to ggml; the one structure passed by value is the argument of ggml_init.
struct GgmlInitParams {
    std::size_t mem_size;
    void* mem_buffer;
    bool no_alloc;
};

struct GgmlApi {
    explicit GgmlApi(const std::string& path) : library(path) {
        library.find("ggml_init", init);
        library.find("ggml_free", free);
        library.find("ggml_new_tensor_4d", new_tensor_4d);
        library.find("ggml_nbytes", nbytes);
        library.find("ggml_tensor_overhead", tensor_overhead);
        library.find("ggml_graph_overhead", graph_overhead);
        library.find("ggml_gated_delta_net", gated_delta_net);
        library.find("ggml_new_graph", new_graph);
        library.find("ggml_build_forward_expand", build_forward_expand);
        library.find("ggml_backend_cpu_init", backend_cpu_init);
        library.find("ggml_backend_cpu_set_n_threads", backend_cpu_set_n_threads);
        library.find("ggml_backend_graph_compute", backend_graph_compute);
        library.find("ggml_backend_free", backend_free);
        library.find("ggml_backend_cpu_buffer_from_ptr", backend_cpu_buffer_from_ptr);
        library.find("ggml_backend_tensor_alloc", backend_tensor_alloc);
        library.find("ggml_backend_buffer_free", backend_buffer_free);
    }

    SharedLibrary library;
    void* (*init)(GgmlInitParams);
    void (*free)(void*);
    void* (*new_tensor_4d)(void*, int, int64_t, int64_t, int64_t, int64_t);
    std::size_t (*nbytes)(const void*);
    std::size_t (*tensor_overhead)();
    std::size_t (*graph_overhead)();
    void* (*gated_delta_net)(void*, void*, void*, void*, void*, void*, void*, int64_t);
    void* (*new_graph)(void*);
    void (*build_forward_expand)(void*, void*);
    void* (*backend_cpu_init)();
    void (*backend_cpu_set_n_threads)(void*, int);
    int (*backend_graph_compute)(void*, void*);
    void (*backend_free)(void*);
    void* (*backend_cpu_buffer_from_ptr)(void*, std::size_t);
    int (*backend_tensor_alloc)(void*, void*, void*);
    void (*backend_buffer_free)(void*);
};

// ggml reads key head `hv % heads_k` for value head hv (tiled) and keeps the state as [V][K]. The same problem in its
// order: value heads permuted so that the two groupings agree, states transposed.
class GgmlRun final : public PeerRun {
public:
    GgmlRun(std::shared_ptr<const GgmlApi> api, const PeerCase& problem)
        : api_(std::move(api)),
          p_(problem),
          head_floats_(p_.dim * p_.dim),
          state_floats_(p_.heads_v * head_floats_),
          out_floats_(p_.T * p_.heads_v * p_.dim),
          q_(p_.T * p_.heads_k * p_.dim),
          k_(p_.T * p_.heads_k * p_.dim),
          v_(out_floats_),
          g_(p_.T * p_.heads_v),
          beta_(p_.T * p_.heads_v),
          states_(p_.states * state_floats_),
          result_(out_floats_ + state_floats_) {
        fill();
        build();
    }

    ~GgmlRun() override {
        for (void* buffer : buffers_) {
            api_->backend_buffer_free(buffer);
        }
        api_->free(context_);
        api_->backend_free(backend_);
    }

    void run(int64_t slot) override {
        if (api_->backend_graph_compute(backend_, graphs_[static_cast<std::size_t>(slot)]) != 0) {
            throw std::runtime_error("ggml_backend_graph_compute failed");
        }
    }

    void fetch() override {
        run(0);
        for (int64_t h = 0; h < p_.heads_v; ++h) {
            const int64_t own = tiled_head(h);
            for (int64_t t = 0; t < p_.T; ++t) {
                std::memcpy(p_.o + (t * p_.heads_v + h) * p_.dim, result_.data() + (t * p_.heads_v + own) * p_.dim,
                            static_cast<std::size_t>(p_.dim) * sizeof(float));
            }
            const float* from = result_.data() + out_floats_ + own * head_floats_;
            float* to = p_.final_state + h * head_floats_;
            for (int64_t i = 0; i < p_.dim; ++i) {
                for (int64_t j = 0; j < p_.dim; ++j) {
                    to[i * p_.dim + j] = from[j * p_.dim + i];
                }
            }
        }
    }

private:
    // Place in ggml's order of our value head h, which belongs to key head h / group.
    int64_t tiled_head(int64_t h) const {
        const int64_t group = p_.heads_v / p_.heads_k;
        return (h % group) * p_.heads_k + h / group;
    }

    void fill() {
        std::copy_n(p_.q, p_.T * p_.heads_k * p_.dim, q_.data());
        std::copy_n(p_.k, p_.T * p_.heads_k * p_.dim, k_.data());
        for (int64_t t = 0; t < p_.T; ++t) {
            for (int64_t h = 0; h < p_.heads_v; ++h) {
                const int64_t from = t * p_.heads_v + h;
                const int64_t to = t * p_.heads_v + tiled_head(h);
                std::copy_n(p_.v + from * p_.dim, p_.dim, v_.data() + to * p_.dim);
                g_[to] = p_.g[from];
                beta_[to] = p_.beta[from];
            }
        }
        for (int64_t s = 0; s < p_.states; ++s) {
            for (int64_t h = 0; h < p_.heads_v; ++h) {
                const float* from = p_.state + s * state_floats_ + h * head_floats_;
                float* to = states_.data() + s * state_floats_ + tiled_head(h) * head_floats_;
                for (int64_t i = 0; i < p_.dim; ++i) {
                    for (int64_t j = 0; j < p_.dim; ++j) {
                        to[j * p_.dim + i] = from[i * p_.dim + j];
                    }
                }
            }
        }
    }

    void* tensor(void* buffer, float* address, int64_t n0, int64_t n1, int64_t n2) {
        constexpr int kGgmlTypeF32 = 0;
        void* result = api_->new_tensor_4d(context_, kGgmlTypeF32, n0, n1, n2, 1);
        place(buffer, result, address);
        return result;
    }

    void place(void* buffer, void* tensor, float* address) {
        if (api_->backend_tensor_alloc(buffer, tensor, address) != 0) {
            throw std::runtime_error("ggml_backend_tensor_alloc failed");
        }
    }

    void* buffer_over(const Floats& floats) {
        buffers_.push_back(api_->backend_cpu_buffer_from_ptr(floats.data(), floats.bytes()));
        return buffers_.back();
    }

    void build() {
        backend_ = api_->backend_cpu_init();
        api_->backend_cpu_set_n_threads(backend_, p_.threads);
        const auto slots = static_cast<std::size_t>(p_.states);
        const std::size_t bytes =
            (2 * slots + 16) * (api_->tensor_overhead() + 64) + slots * (api_->graph_overhead() + 64);
        context_ = api_->init(GgmlInitParams{bytes, nullptr, true});
        if (backend_ == nullptr || context_ == nullptr) {
            throw std::runtime_error("ggml could not be initialised");
        }
        void* q = tensor(buffer_over(q_), q_.data(), p_.dim, p_.heads_k, p_.T);
        void* k = tensor(buffer_over(k_), k_.data(), p_.dim, p_.heads_k, p_.T);
        void* v = tensor(buffer_over(v_), v_.data(), p_.dim, p_.heads_v, p_.T);
        void* g = tensor(buffer_over(g_), g_.data(), 1, p_.heads_v, p_.T);
        void* beta = tensor(buffer_over(beta_), beta_.data(), 1, p_.heads_v, p_.T);
        void* states = buffer_over(states_);
        void* result = buffer_over(result_);
        for (int64_t s = 0; s < p_.states; ++s) {
            void* state = tensor(states, states_.data() + s * state_floats_, p_.dim, p_.dim, p_.heads_v);
            void* op = api_->gated_delta_net(context_, q, k, v, g, beta, state, 1);
            // One result for all slots: the op always writes the new state beside its output, and a result that stays
            // in the cache is the kindest way to time that. The copy back, which a decoder needs, is not counted.
            place(result, op, result_.data());
            void* graph = api_->new_graph(context_);
            api_->build_forward_expand(graph, op);
            graphs_.push_back(graph);
        }
    }

    std::shared_ptr<const GgmlApi> api_;
    PeerCase p_;
    int64_t head_floats_, state_floats_, out_floats_;
    Floats q_, k_, v_, g_, beta_, states_, result_;
    void* backend_ = nullptr;
    void* context_ = nullptr;
    std::vector<void*> buffers_;
    std::vector<void*> graphs_;
};

class Ggml final : public Peer {
public:
    explicit Ggml(const std::string& library) : api_(std::make_shared<const GgmlApi>(library)) {}
    std::string name() const override { return "ggml"; }
    bool supports(StateUpdate update) const override { return update == StateUpdate::to_output; }
    std::unique_ptr<PeerRun> prepare(const PeerCase& problem, StateUpdate) override {
        return std::make_unique<GgmlRun>(api_, problem);
    }

private:
    std::shared_ptr<const GgmlApi> api_;
};

// ----------------------------------------------------------------------------------------------- ik_llama

// Strides of v are in floats. q and k are [seq][head][token][dim], g and beta [seq][token][head], the output
// [seq][token][head][dim], states [seq][head][K][V]. beta is a logit: the sigmoid is inside. `repeat_type` 0 means
// interleaved grouping. Each of `nth` callers, numbered `ith`, takes a contiguous range of heads.
using IkFusedDeltaNet = bool(int head_dim, int n_heads, int gqa_ratio, int repeat_type, int n_tokens, int n_seqs,
                             std::size_t v_token, std::size_t v_head, std::size_t v_seq, const float* q, const float* k,
                             const float* v, const float* g, const float* beta, const float* state_in, float* out,
                             float* state_out, float* saved_steps, int state_step_stride, int ith, int nth);

class IkRun final : public PeerRun {
public:
    IkRun(IkFusedDeltaNet* function, const PeerCase& problem, StateUpdate update)
        : function_(function),
          p_(problem),
          update_(update),
          state_floats_(p_.heads_v * p_.dim * p_.dim),
          q_(p_.T * p_.heads_k * p_.dim),
          k_(p_.T * p_.heads_k * p_.dim),
          v_(p_.T * p_.heads_v * p_.dim),
          g_(p_.T * p_.heads_v),
          beta_(p_.T * p_.heads_v),
          states_(p_.states * state_floats_),
          out_(p_.T * p_.heads_v * p_.dim),
          new_state_(update == StateUpdate::to_output ? state_floats_ : 0) {
        for (int64_t t = 0; t < p_.T; ++t) {
            for (int64_t h = 0; h < p_.heads_k; ++h) {
                std::copy_n(p_.q + (t * p_.heads_k + h) * p_.dim, p_.dim, q_.data() + (h * p_.T + t) * p_.dim);
                std::copy_n(p_.k + (t * p_.heads_k + h) * p_.dim, p_.dim, k_.data() + (h * p_.T + t) * p_.dim);
            }
        }
        std::copy_n(p_.v, p_.T * p_.heads_v * p_.dim, v_.data());
        std::copy_n(p_.g, p_.T * p_.heads_v, g_.data());
        for (int64_t i = 0; i < p_.T * p_.heads_v; ++i) {
            const double b = p_.beta[i];
            beta_[i] = static_cast<float>(std::log(b / (1.0 - b)));
        }
        restore();
    }

    void run(int64_t slot) override {
        float* state = states_.data() + slot * state_floats_;
        float* new_state = update_ == StateUpdate::in_place ? state : new_state_.data();
        bool done = true;
        if (p_.threads == 1) {
            done = call(state, new_state, 0, 1);
        } else {
#pragma omp parallel num_threads(p_.threads) reduction(&& : done)
            done = call(state, new_state, omp_get_thread_num(), omp_get_num_threads());
        }
        if (!done) {
            throw std::runtime_error("iqk_fused_delta_net refused the shape");
        }
    }

    void fetch() override {
        restore();
        run(0);
        std::copy_n(out_.data(), p_.T * p_.heads_v * p_.dim, p_.o);
        std::copy_n(update_ == StateUpdate::in_place ? states_.data() : new_state_.data(), state_floats_,
                    p_.final_state);
        restore();
    }

private:
    bool call(const float* state, float* new_state, int ith, int nth) const {
        return function_(static_cast<int>(p_.dim), static_cast<int>(p_.heads_v),
                         static_cast<int>(p_.heads_v / p_.heads_k), 0, static_cast<int>(p_.T), 1,
                         static_cast<std::size_t>(p_.heads_v * p_.dim), static_cast<std::size_t>(p_.dim),
                         static_cast<std::size_t>(p_.T * p_.heads_v * p_.dim), q_.data(), k_.data(), v_.data(),
                         g_.data(), beta_.data(), state, out_.data(), new_state, nullptr, 0, ith, nth);
    }

    void restore() { std::copy_n(p_.state, p_.states * state_floats_, states_.data()); }

    IkFusedDeltaNet* function_;
    PeerCase p_;
    StateUpdate update_;
    int64_t state_floats_;
    Floats q_, k_, v_, g_, beta_, states_, out_, new_state_;
};

class IkLlama final : public Peer {
public:
    explicit IkLlama(const std::string& library) : library_(library) {
        library_.find("iqk_fused_delta_net", function_);
    }
    std::string name() const override { return "ik_llama"; }
    bool supports(StateUpdate) const override { return true; }
    std::unique_ptr<PeerRun> prepare(const PeerCase& problem, StateUpdate update) override {
        return std::make_unique<IkRun>(function_, problem, update);
    }

private:
    SharedLibrary library_;
    IkFusedDeltaNet* function_ = nullptr;
};

}  // namespace

std::unique_ptr<Peer> load_ggml(const std::string& library) { return std::make_unique<Ggml>(library); }

std::unique_ptr<Peer> load_ik_llama(const std::string& library) { return std::make_unique<IkLlama>(library); }

void reference_recurrence(const PeerCase& p, double* o, double* final_state) {
    const int64_t n = p.dim;
    const double scale = 1.0 / std::sqrt(static_cast<double>(n));
    std::copy_n(p.state, p.heads_v * n * n, final_state);
#pragma omp parallel for num_threads(p.threads)
    for (int64_t h = 0; h < p.heads_v; ++h) {
        const int64_t hk = h / (p.heads_v / p.heads_k);
        double* state = final_state + h * n * n;  // [K, V]
        std::vector<double> d(static_cast<std::size_t>(n));
        for (int64_t t = 0; t < p.T; ++t) {
            const float* q = p.q + (t * p.heads_k + hk) * n;
            const float* k = p.k + (t * p.heads_k + hk) * n;
            const float* v = p.v + (t * p.heads_v + h) * n;
            double* out = o + (t * p.heads_v + h) * n;
            const double decay = std::exp(static_cast<double>(p.g[t * p.heads_v + h]));
            const double beta = p.beta[t * p.heads_v + h];
            std::fill(d.begin(), d.end(), 0.0);
            std::fill(out, out + n, 0.0);
            for (int64_t i = 0; i < n; ++i) {
                for (int64_t j = 0; j < n; ++j) {
                    state[i * n + j] *= decay;
                    d[static_cast<std::size_t>(j)] += state[i * n + j] * k[i];
                }
            }
            for (int64_t j = 0; j < n; ++j) {
                d[static_cast<std::size_t>(j)] = beta * (v[j] - d[static_cast<std::size_t>(j)]);
            }
            for (int64_t i = 0; i < n; ++i) {
                for (int64_t j = 0; j < n; ++j) {
                    state[i * n + j] += k[i] * d[static_cast<std::size_t>(j)];
                    out[j] += scale * q[i] * state[i * n + j];
                }
            }
        }
    }
}

}  // namespace flashqla::bench
