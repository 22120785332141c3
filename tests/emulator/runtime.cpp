// The functions of the CUDA runtime that the library and the command line tool call, for one GPU that is not there. Its
// memory is the host's and starts as NaNs; graphs are refused.
//
// FQLA_EMULATED_GPU = "multiprocessors,kilobytes of shared memory a block" makes another GPU of it, such as "82,99".
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct Gpu {
    int multiprocessors = 132, shared_kilobytes = 227;

    Gpu() {
        if (const char* text = std::getenv("FQLA_EMULATED_GPU")) {
            if (std::sscanf(text, "%d,%d", &multiprocessors, &shared_kilobytes) != 2) {
                std::fprintf(stderr, "FQLA_EMULATED_GPU is '%s'; it must be two numbers, such as 82,99\n", text);
                std::abort();
            }
        }
    }
};
const Gpu gpu;

cudaError_t allocate(void** p, std::size_t bytes) {
    constexpr std::size_t kAlignment = 256;
    bytes = (bytes / kAlignment + 1) * kAlignment;
    *p = std::aligned_alloc(kAlignment, bytes);
    if (!*p) return cudaErrorMemoryAllocation;
    std::memset(*p, 0xff, bytes);
    return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {};
    std::strcpy(properties->name, "emulated GPU");
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int) {
    switch (name) {
        case cudaDevAttrComputeCapabilityMajor: *value = 8; break;
        case cudaDevAttrMultiProcessorCount: *value = gpu.multiprocessors; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = gpu.shared_kilobytes << 10; break;
        case cudaDevAttrConcurrentManagedAccess: *value = 1; break;
        default: *value = 0;
    }
    return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the emulated GPU"; }
const char* cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorNotSupported ? "cudaErrorNotSupported" : "cudaErrorMemoryAllocation";
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

cudaError_t cudaMalloc(void** p, std::size_t bytes) { return allocate(p, bytes); }
cudaError_t cudaMallocManaged(void** p, std::size_t bytes, unsigned) { return allocate(p, bytes); }
cudaError_t cudaHostAlloc(void** p, std::size_t bytes, unsigned) { return allocate(p, bytes); }
cudaError_t cudaFree(void* p) {
    std::free(p);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void* p) { return cudaFree(p); }
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
    std::memcpy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t*, unsigned) { return cudaErrorNotSupported; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return cudaErrorNotSupported; }
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) { return cudaErrorNotSupported; }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t*, cudaGraph_t, unsigned long long) { return cudaErrorNotSupported; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t*) { return cudaErrorNotSupported; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaErrorNotSupported; }
cudaError_t cudaEventElapsedTime(float*, cudaEvent_t, cudaEvent_t) { return cudaErrorNotSupported; }
}
