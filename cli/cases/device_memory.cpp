#include "cases/device_memory.hpp"

#include <algorithm>
#include <new>

#ifdef FQLA_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace flashqla::cases {
namespace {

constexpr std::align_val_t kAlignment{64};

std::shared_ptr<std::byte> allocate_on_host(std::size_t bytes) {
    return {static_cast<std::byte*>(::operator new(bytes, kAlignment)),
            [](std::byte* p) { ::operator delete(p, kAlignment); }};
}

#ifdef FQLA_HAVE_CUDA

std::string text_of(cudaError_t error) {
    return std::string(cudaGetErrorString(error)) + " (" + cudaGetErrorName(error) + ")";
}

// Where a GPU cannot take page faults, it reads the host's memory over the bus instead: slow, and right.
bool has_managed_memory(int device) {
    int value = 0;
    return cudaDeviceGetAttribute(&value, cudaDevAttrConcurrentManagedAccess, device) == cudaSuccess && value != 0;
}

std::shared_ptr<std::byte> allocate_for_gpu(int device, std::size_t bytes) {
    void* p = nullptr;
    if (cudaSetDevice(device) != cudaSuccess) throw std::bad_alloc();
    bytes = std::max<std::size_t>(bytes, 1);
    if (has_managed_memory(device)) {
        if (cudaMallocManaged(&p, bytes) != cudaSuccess) throw std::bad_alloc();
        return {static_cast<std::byte*>(p), [](std::byte* q) { (void)cudaFree(q); }};
    }
    if (cudaHostAlloc(&p, bytes, cudaHostAllocMapped | cudaHostAllocPortable) != cudaSuccess) throw std::bad_alloc();
    return {static_cast<std::byte*>(p), [](std::byte* q) { (void)cudaFreeHost(q); }};
}

// The first failure of a row of CUDA calls.
class Steps {
public:
    void add(const char* what, cudaError_t error) {
        if (error != cudaSuccess && status_.ok())
            status_ = {Code::device_error, std::string(what) + ": " + text_of(error)};
    }
    const Status& status() const { return status_; }

private:
    Status status_;
};

#else

const char* const kNoCuda = "this build has no CUDA; configure it with FQLA_ENABLE_CUDA=ON";

#endif

}  // namespace

#ifdef FQLA_HAVE_CUDA

struct Recording::Parts {
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    cudaEvent_t begin = nullptr, end = nullptr;

    ~Parts() {
        if (executable) (void)cudaGraphExecDestroy(executable);
        if (graph) (void)cudaGraphDestroy(graph);
        if (begin) (void)cudaEventDestroy(begin);
        if (end) (void)cudaEventDestroy(end);
        if (stream) (void)cudaStreamDestroy(stream);
    }
};

Result<Recording> Recording::make(Device device, const std::function<Status(Stream)>& work) {
    Recording made;
    made.parts_ = std::make_shared<Parts>();
    Parts& p = *made.parts_;
    Steps steps;
    steps.add("cudaSetDevice", cudaSetDevice(device.index));
    steps.add("cudaStreamCreate", cudaStreamCreateWithFlags(&p.stream, cudaStreamNonBlocking));
    steps.add("cudaEventCreate", cudaEventCreate(&p.begin));
    steps.add("cudaEventCreate", cudaEventCreate(&p.end));
    steps.add("cudaStreamBeginCapture", cudaStreamBeginCapture(p.stream, cudaStreamCaptureModeThreadLocal));
    if (!steps.status().ok()) return steps.status();
    const Status submitted = work({p.stream});
    steps.add("cudaStreamEndCapture", cudaStreamEndCapture(p.stream, &p.graph));
    if (!submitted.ok()) return submitted;
    if (steps.status().ok()) steps.add("cudaGraphInstantiate", cudaGraphInstantiate(&p.executable, p.graph, 0));
    if (!steps.status().ok()) return steps.status();
    return made;
}

Result<double> Recording::seconds(int times) const {
    Steps steps;
    steps.add("cudaEventRecord", cudaEventRecord(parts_->begin, parts_->stream));
    for (int i = 0; i < times; ++i) steps.add("cudaGraphLaunch", cudaGraphLaunch(parts_->executable, parts_->stream));
    steps.add("cudaEventRecord", cudaEventRecord(parts_->end, parts_->stream));
    steps.add("cudaEventSynchronize", cudaEventSynchronize(parts_->end));
    float ms = 0;
    steps.add("cudaEventElapsedTime", cudaEventElapsedTime(&ms, parts_->begin, parts_->end));
    if (!steps.status().ok()) return steps.status();
    return double{ms} * 1e-3 / times;
}

std::shared_ptr<std::byte> allocate_on_gpu(Device device, std::size_t bytes, Status& status) {
    Steps steps;
    void* p = nullptr;
    steps.add("cudaSetDevice", cudaSetDevice(device.index));
    steps.add("cudaMalloc", cudaMalloc(&p, std::max<std::size_t>(bytes, 1)));
    status = steps.status();
    if (!status.ok()) return nullptr;
    return {static_cast<std::byte*>(p), [](std::byte* q) { (void)cudaFree(q); }};
}

Status repeat_on_gpu(std::byte* to, std::size_t bytes, const void* block, std::size_t block_bytes) {
    Steps steps;
    std::size_t done = std::min(bytes, block_bytes);
    steps.add("cudaMemcpy", cudaMemcpy(to, block, done, cudaMemcpyHostToDevice));
    while (done > 0 && done < bytes && steps.status().ok()) {
        const std::size_t next = std::min(done, bytes - done);
        steps.add("cudaMemcpy", cudaMemcpy(to + done, to, next, cudaMemcpyDeviceToDevice));
        done += next;
    }
    // The copies may still be under way, and no other stream waits for them.
    steps.add("cudaDeviceSynchronize", cudaDeviceSynchronize());
    return steps.status();
}

#else

struct Recording::Parts {};

Result<Recording> Recording::make(Device, const std::function<Status(Stream)>&) {
    return Status(Code::unsupported, kNoCuda);
}
Result<double> Recording::seconds(int) const { return Status(Code::unsupported, kNoCuda); }

std::shared_ptr<std::byte> allocate_on_gpu(Device, std::size_t, Status& status) {
    status = {Code::unsupported, kNoCuda};
    return nullptr;
}
Status repeat_on_gpu(std::byte*, std::size_t, const void*, std::size_t) { return {Code::unsupported, kNoCuda}; }

#endif

std::string device_problem(Device device) {
    if (device.type == DeviceType::cpu) return device.index == 0 ? "" : "there is only one CPU, cpu";
#ifdef FQLA_HAVE_CUDA
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) return "no GPU can be used: " + text_of(error);
    if (device.index < count) return "";
    return "there is no cuda:" + std::to_string(device.index) + "; there are " + std::to_string(count) + " GPUs";
#else
    return kNoCuda;
#endif
}

std::shared_ptr<std::byte> allocate_shared(Device device, std::size_t bytes) {
#ifdef FQLA_HAVE_CUDA
    if (device.type == DeviceType::cuda) return allocate_for_gpu(device.index, bytes);
#endif
    return allocate_on_host(bytes);
}

Status finish(Device device) {
#ifdef FQLA_HAVE_CUDA
    if (device.type == DeviceType::cuda) {
        const cudaError_t error = cudaDeviceSynchronize();
        if (error != cudaSuccess) return {Code::device_error, "the GPU reports: " + text_of(error)};
    }
#endif
    return {};
}

}  // namespace flashqla::cases
