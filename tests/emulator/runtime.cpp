// The functions of the CUDA runtime that the library and the command line tool call, for one GPU that is not there. Its
// memory is the host's and starts as NaNs; a graph is a list of grids; time is not measured.
//
// FQLA_EMULATED_GPU = "multiprocessors,kilobytes of shared memory a block[,compute capability's major number]" makes
// another GPU of it, such as "82,99", or "132,227,9", which takes Hopper's kernels.
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "block.hpp"

namespace {

struct Gpu {
    int multiprocessors = 132, shared_kilobytes = 227, major = 8;

    Gpu() {
        if (const char* text = std::getenv("FQLA_EMULATED_GPU")) {
            if (std::sscanf(text, "%d,%d,%d", &multiprocessors, &shared_kilobytes, &major) < 2) {
                std::fprintf(stderr, "FQLA_EMULATED_GPU is '%s'; it must be two or three numbers, such as 82,99\n",
                             text);
                std::abort();
            }
        }
    }
};
const Gpu gpu;

// Pages that nobody may touch lie on both sides, and the memory ends where its pages end (to 16 bytes): an access
// outside ends the process there and then.
std::mutex memory_mutex;
std::unordered_map<void*, std::pair<void*, std::size_t>> memory;  // the pages of each allocation

cudaError_t allocate(void** p, std::size_t bytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    bytes = (std::max<std::size_t>(bytes, 1) + 15) / 16 * 16;
    const std::size_t inner = (bytes + page - 1) / page * page, all = inner + 2 * page;
    void* pages = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return cudaErrorMemoryAllocation;
    std::byte* begin = static_cast<std::byte*>(pages) + page;
    if (mprotect(begin, inner, PROT_READ | PROT_WRITE) != 0) return cudaErrorMemoryAllocation;
    std::memset(begin, 0xff, inner);
    *p = begin + inner - bytes;
    const std::lock_guard lock(memory_mutex);
    memory[*p] = {pages, all};
    return cudaSuccess;
}

struct Grid {
    unsigned blocks, threads;
    std::size_t shared_bytes;
    std::function<void()> kernel;
};
using Grids = std::vector<Grid>;
thread_local Grids* recording = nullptr;

}  // namespace

void emulator::submit(unsigned blocks, unsigned threads, std::size_t shared_bytes, std::function<void()> kernel) {
    if (recording) {
        recording->push_back({blocks, threads, shared_bytes, std::move(kernel)});
    } else {
        run_grid(blocks, threads, shared_bytes, kernel);
    }
}

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
        case cudaDevAttrComputeCapabilityMajor: *value = gpu.major; break;
        case cudaDevAttrMultiProcessorCount: *value = gpu.multiprocessors; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = gpu.shared_kilobytes << 10; break;
        case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1 << 10; break;
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
    const std::lock_guard lock(memory_mutex);
    const auto found = memory.find(p);
    if (found == memory.end()) return cudaSuccess;
    munmap(found->second.first, found->second.second);
    memory.erase(found);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void* p) { return cudaFree(p); }
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
    std::memcpy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
    std::memset(to, value, bytes);
    return cudaSuccess;
}

// There is one stream, and what was submitted to it has run. A graph is the list of its grids.
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    *stream = nullptr;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
    recording = new Grids;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
    *graph = reinterpret_cast<cudaGraph_t>(recording);
    recording = nullptr;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
    *executable = reinterpret_cast<cudaGraphExec_t>(new Grids(*reinterpret_cast<Grids*>(graph)));
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
    for (const Grid& grid : *reinterpret_cast<Grids*>(executable)) {
        emulator::run_grid(grid.blocks, grid.threads, grid.shared_bytes, grid.kernel);
    }
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    delete reinterpret_cast<Grids*>(executable);
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete reinterpret_cast<Grids*>(graph);
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t*) { return cudaErrorNotSupported; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaErrorNotSupported; }
cudaError_t cudaEventElapsedTime(float*, cudaEvent_t, cudaEvent_t) { return cudaErrorNotSupported; }
}
