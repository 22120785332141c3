// What the GPU's test programs share: cases in the GPU's own memory, garbage around and inside what a call may use,
// bits of results, and an exit code that says skipped where there is no GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cases/device_copy.hpp"
#include "cases/device_memory.hpp"
#include "cases/grammar.hpp"
#include "cases/runner.hpp"

namespace flashqla::gpu_test {

inline constexpr int kSkipped = 77;

struct Totals {
    int passed = 0, failed = 0, unsupported = 0;
};
inline Totals& totals() {
    static Totals counted;
    return counted;
}

inline bool expect(bool good, const std::string& what) {
    (good ? totals().passed : totals().failed) += 1;
    if (!good) std::printf("FAILED: %s\n", what.c_str());
    return good;
}
inline bool expect(const Status& status, const std::string& what) {
    return expect(status.ok(), what + ": " + status.message());
}
// A CUDA call that has to succeed; what follows makes no sense without it.
inline void must(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    std::printf("FAILED: %s: %s\n", what, cudaGetErrorString(error));
    std::exit(1);
}

inline int run(const char* name, const std::function<void()>& body) {
    const std::string problem = cases::device_problem({DeviceType::cuda, 0});
    if (!problem.empty()) {
        std::printf("%s: skipped: %s\n", name, problem.c_str());
        return kSkipped;
    }
    cudaStream_t stream = nullptr;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaErrorNotSupported) {
        std::printf("%s: skipped: the emulated GPU has no streams\n", name);
        return kSkipped;
    }
    (void)cudaStreamDestroy(stream);
    body();
    const Totals& t = totals();
    if (t.unsupported > 0) std::printf("%d cases are not supported by this build and were left out\n", t.unsupported);
    std::printf("%s: %d passed, %d failed\n", name, t.passed, t.failed);
    return t.failed == 0 && t.passed > 0 ? 0 : 1;
}

struct CudaStream {
    cudaStream_t handle = nullptr;
    CudaStream() { must(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "cudaStreamCreate"); }
    CudaStream(const CudaStream&) = delete;
    CudaStream& operator=(const CudaStream&) = delete;
    ~CudaStream() { (void)cudaStreamDestroy(handle); }
    void wait() const { must(cudaStreamSynchronize(handle), "cudaStreamSynchronize"); }
};

using Bytes = std::vector<std::byte>;

// A case on the GPU with its plan and a workspace of exactly the promised size. The tensors start as the case draws
// them, outputs and everything that must not be read poisoned with NaN.
class Setup {
public:
    // Null when no backend supports the case.
    static std::unique_ptr<Setup> make(const std::string& line) {
        cases::Parsed<cases::Case> parsed = cases::parse_case(line);
        if (!parsed.ok()) {
            expect(false, line + ": " + parsed.error);
            return nullptr;
        }
        cases::Case c = parsed.value;
        c.device = {DeviceType::cuda, 0};
        Result<Plan> plan = cases::plan_of(c);
        if (!plan.ok() || plan->backend(c.pass).empty()) {
            if (plan.ok() || plan.status().code() == Code::unsupported) {
                totals().unsupported += 1;
                std::printf("not supported: %s\n", line.c_str());
            } else {
                expect(plan.status(), line);
            }
            return nullptr;
        }
        return std::unique_ptr<Setup>(new Setup(line, c, std::move(plan).value()));
    }

    const cases::Case& the_case() const { return case_; }
    const std::string& line() const { return line_; }
    const Plan& plan() const { return plan_; }
    cases::Instance& instance() { return copy_.instance; }

    // Everything as the case draws it, and a workspace full of the byte (0xff: NaN in every float type).
    void reset(int garbage = 0xff) {
        for (std::size_t i = 0; i < copy_.memory.size(); ++i) {
            must(cudaMemcpy(copy_.memory[i].get(), fresh_[i].data(), copy_.bytes[i], cudaMemcpyHostToDevice),
                 "cudaMemcpy");
        }
        if (workspace_bytes_ > 0) must(cudaMemset(workspace_.get(), garbage, workspace_bytes_), "cudaMemset");
        // NOTE: copies from pageable memory may still be under way when they return, and no other stream waits for
        // them.
        must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
    Status submit(Stream stream) { return submit(stream, plan_); }
    Status submit(Stream stream, const Plan& plan) {
        const Workspace workspace{workspace_bytes_ > 0 ? workspace_.get() : nullptr, workspace_bytes_};
        return cases::submit(case_, plan, copy_.instance, workspace, stream);
    }
    // The bytes of every tensor, inputs too: nothing but the result may change.
    std::vector<Bytes> fetch() const {
        std::vector<Bytes> all;
        for (std::size_t i = 0; i < copy_.memory.size(); ++i) {
            all.emplace_back(copy_.bytes[i]);
            must(cudaMemcpy(all.back().data(), copy_.memory[i].get(), copy_.bytes[i], cudaMemcpyDeviceToHost),
                 "cudaMemcpy");
        }
        return all;
    }
    // The GPU's memory of tensor storage i, and whether a call writes results there.
    std::size_t storages() const { return copy_.memory.size(); }
    std::byte* memory(std::size_t i) { return copy_.memory[i].get(); }
    std::size_t bytes(std::size_t i) const { return copy_.bytes[i]; }
    std::vector<bool> results() const {
        std::vector<const cases::Storage*> seen;
        std::vector<bool> found;
        for (const cases::HostTensor& tensor : copy_.instance.tensors) {
            const bool result = copy_.instance.is_output(tensor.name) || tensor.name == "intermediate_states" ||
                                tensor.name == "state" || tensor.name == "final_state";
            std::size_t i = 0;
            while (i < seen.size() && seen[i] != tensor.storage.get()) ++i;
            if (i == seen.size()) {
                seen.push_back(tensor.storage.get());
                found.push_back(result);
            } else {
                found[i] = found[i] || result;
            }
        }
        return found;
    }

    // One call on a new stream, waited for.
    std::vector<Bytes> eager(const std::string& what) {
        const CudaStream stream;
        expect(submit({stream.handle}), what);
        stream.wait();
        return fetch();
    }

private:
    Setup(std::string line, const cases::Case& c, Plan plan)
        : line_(std::move(line)), case_(c), plan_(std::move(plan)) {
        Result<cases::DeviceCopy> copy = cases::GpuTensors(c).copy();
        if (!copy.ok()) {
            std::printf("FAILED: %s: %s\n", line_.c_str(), copy.status().message().c_str());
            std::exit(1);
        }
        copy_ = std::move(copy).value();
        fresh_ = fetch();
        workspace_bytes_ = plan_.workspace_bytes(c.pass);
        Status status;
        workspace_ = cases::allocate_on_gpu(c.device, workspace_bytes_, status);
        expect(status, line_);
    }

    std::string line_;
    cases::Case case_;
    Plan plan_;
    cases::DeviceCopy copy_;
    std::vector<Bytes> fresh_;
    std::shared_ptr<std::byte> workspace_;
    std::size_t workspace_bytes_ = 0;
};

// Integers into an index tensor on the GPU, whatever its type.
inline void write(const TensorView& view, const std::vector<std::int64_t>& numbers, cudaStream_t stream = nullptr) {
    if (!view.given()) return;
    const std::size_t width = size_of(view.dtype);
    Bytes bytes(numbers.size() * width);
    for (std::size_t i = 0; i < numbers.size(); ++i) std::memcpy(bytes.data() + i * width, &numbers[i], width);
    must(cudaMemcpyAsync(view.data, bytes.data(), bytes.size(), cudaMemcpyHostToDevice, stream), "cudaMemcpy");
    must(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

inline std::vector<std::int64_t> offsets_of(const std::vector<std::int64_t>& lens) {
    std::vector<std::int64_t> offsets = {0};
    for (const std::int64_t n : lens) offsets.push_back(offsets.back() + n);
    return offsets;
}

inline bool expect_same(const std::vector<Bytes>& a, const std::vector<Bytes>& b, const std::string& what) {
    for (std::size_t i = 0; i < a.size(); ++i) {
        if (a[i] == b[i]) continue;
        std::size_t at = 0;
        while (a[i][at] == b[i][at]) ++at;
        return expect(false, what + ": tensor " + std::to_string(i) + " differs from byte " + std::to_string(at));
    }
    return expect(true, what);
}

}  // namespace flashqla::gpu_test
