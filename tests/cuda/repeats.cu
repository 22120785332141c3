// The same call a thousand times gives the same bits. Results are poisoned before each call and compared on the GPU, so
// that it is busy with nothing else.
//
//   cuda_repeats [TIMES]        default: 1000

#include <algorithm>

#include "gpu_test.hpp"

namespace {

using namespace flashqla;
using namespace flashqla::gpu_test;

__global__ void count_differences(const std::uint32_t* a, const std::uint32_t* b, std::size_t words,
                                  unsigned long long* differences) {
    unsigned long long mine = 0;
    for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < words;
         i += std::size_t{gridDim.x} * blockDim.x)
        mine += a[i] != b[i];
    if (mine > 0) atomicAdd(differences, mine);
}

void repeat(const std::string& line, int times) {
    const std::unique_ptr<Setup> setup = Setup::make(line);
    if (!setup) return;
    setup->reset();
    const std::vector<bool> results = setup->results();
    // The pool of a decode case is an input too; these cases leave it as it is.
    const auto keeps = [&](std::size_t i) { return setup->memory(i) == setup->instance().decode.state.data; };
    const CudaStream stream;
    // NOTE: poison also before the call that the others are compared with: parts of a buffer are nobody's results.
    const auto call_on_poison = [&] {
        for (std::size_t i = 0; i < setup->storages(); ++i) {
            if (results[i] && !keeps(i)) {
                must(cudaMemsetAsync(setup->memory(i), 0xff, setup->bytes(i), stream.handle), "cudaMemsetAsync");
            }
        }
        return setup->submit({stream.handle});
    };
    Status status = call_on_poison();
    stream.wait();
    if (!expect(status, line)) return;
    std::vector<std::shared_ptr<std::byte>> first(setup->storages());
    for (std::size_t i = 0; i < first.size(); ++i) {
        if (!results[i]) continue;
        first[i] = cases::allocate_on_gpu({DeviceType::cuda, 0}, setup->bytes(i), status);
        if (!expect(status, line)) return;
        must(cudaMemcpy(first[i].get(), setup->memory(i), setup->bytes(i), cudaMemcpyDeviceToDevice), "cudaMemcpy");
    }
    const std::shared_ptr<std::byte> counter = cases::allocate_on_gpu({DeviceType::cuda, 0}, 8, status);
    if (!expect(status, line)) return;
    auto* differences = reinterpret_cast<unsigned long long*>(counter.get());
    must(cudaMemset(differences, 0, 8), "cudaMemset");
    must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");

    Status submitted;
    for (int time = 0; time < times && submitted.ok(); ++time) {
        // NOTE: nvcc takes an assignment for a dropped result.
        (void)(submitted = call_on_poison());
        for (std::size_t i = 0; i < first.size(); ++i) {
            if (!results[i]) continue;
            count_differences<<<264, 256, 0, stream.handle>>>(reinterpret_cast<const std::uint32_t*>(setup->memory(i)),
                                                              reinterpret_cast<const std::uint32_t*>(first[i].get()),
                                                              setup->bytes(i) / 4, differences);
        }
    }
    stream.wait();
    if (!expect(submitted, line)) return;
    must(cudaGetLastError(), "count_differences");
    unsigned long long found = 0;
    must(cudaMemcpy(&found, differences, 8, cudaMemcpyDeviceToHost), "cudaMemcpy");
    expect(found == 0, line + ": " + std::to_string(found) + " words differed in " + std::to_string(times) + " calls");
}

void body(int times) {
    // The lengths that hung another library, and ragged ones on few heads, where a sequence may be split.
    repeat("fwd:lens=1238+1199+1240+1216+1187+1203+519,hk16,hv48,bf16,h0", times);
    repeat("fwd:lens=4000+0+1+96,hk2,hv8,bf16,g=published,h0", times);
    repeat("fwd:lens=138+119+140+116+187+103+119,hk2,hv6,k64,f32,h0", times);
    repeat("fwd:b2,t300,hk2,hv4,k100,v96,f16,h0,layout=vk,gate=raw,beta=logit,l2norm,keys=raw", times);
    repeat("bwd:lens=1238+1199+1240+1216+1187+1203+519,hk4,hv8,bf16,h0", times);
    repeat("bwd:lens=4000+0+1+96,hk2,hv4,bf16,g=published,h0", times);
    repeat("bwd:lens=138+119+140+116+187+103+119,hk2,hv6,k64,f32,h0,gate=raw,l2norm,keys=raw", times);
    repeat("dec:b64,t1,hk8,hv16,bf16,pool=100,nocommit", times);
    repeat("dec:b64,t4,hk8,hv16,bf16,pool=100,state=bf16,nocommit,layout=vk", times);
    repeat("dec:b16,t8,hk8,hv16,bf16,verify=tree,accepted=0x16", times);
}

}  // namespace

int main(int count, char** words) {
    const int times = count > 1 ? std::max(std::atoi(words[1]), 1) : 1000;
    return run("repeats", [times] { body(times); });
}
