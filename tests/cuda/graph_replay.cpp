// A call captured once in a CUDA graph and replayed after cu_seqlens and slots were overwritten in place gives the bits
// of a plain call with those lengths and slots. Neither depends on what lies in scratch, padding or unused slots.

#include "gpu_test.hpp"

namespace {

using namespace flashqla;
using namespace flashqla::gpu_test;

struct Graph {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;

    Graph(Setup& setup, const CudaStream& stream) {
        must(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
        expect(setup.submit({stream.handle}), setup.line());
        must(cudaStreamEndCapture(stream.handle, &graph), "cudaStreamEndCapture");
        must(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    }
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
    ~Graph() {
        (void)cudaGraphExecDestroy(executable);
        (void)cudaGraphDestroy(graph);
    }
};

// A change of the index tensors in place; the tensors of a case that has no such argument stay as they are.
struct Change {
    std::string name;
    std::vector<std::int64_t> lens;   // of cu_seqlens; empty: as drawn
    std::vector<std::int64_t> slots;  // of state_indices; empty: as drawn
};

void apply(Setup& setup, const Change& change) {
    cases::Instance& x = setup.instance();
    const Pass pass = setup.the_case().pass;
    if (!change.lens.empty()) {
        for (const TensorView* view : {&x.forward.cu_seqlens, &x.backward.cu_seqlens, &x.decode.cu_seqlens}) {
            if (view->given()) write(*view, offsets_of(change.lens));
        }
    }
    if (!change.slots.empty()) {
        write(pass == Pass::decode ? x.decode.state_indices : x.forward.state_indices, change.slots);
    }
}

void replay(const std::string& line, const std::vector<Change>& changes) {
    const std::unique_ptr<Setup> setup = Setup::make(line);
    if (!setup) return;
    const CudaStream stream;
    setup->reset();
    const Graph graph(*setup, stream);
    int garbage = 0;
    for (const Change& change : changes) {
        const std::string what = line + ", " + change.name;
        setup->reset(0xff);
        apply(*setup, change);
        const std::vector<Bytes> plain = setup->eager(what);
        // All zero bytes, large numbers, small ones, NaN.
        constexpr int kGarbage[] = {0x00, 0x7b, 0x11, 0xff};
        setup->reset(kGarbage[garbage++ % 4]);
        apply(*setup, change);
        // Twice where nothing is updated in place: what a replay leaves in its scratch is garbage to the next.
        const bool in_place = setup->the_case().pass == Pass::decode || setup->the_case().pool > 0;
        for (int times = 0; times < (in_place ? 1 : 2); ++times) {
            must(cudaGraphLaunch(graph.executable, stream.handle), "cudaGraphLaunch");
        }
        stream.wait();
        expect_same(plain, setup->fetch(), what);
    }
}

void body() {
    const std::vector<Change> lengths = {
        {"as captured", {}, {}},
        {"other lengths", {1, 199, 64, 36}, {}},
        {"empty ones", {0, 300, 0, 0}, {}},
        {"nothing but empty ones", {0, 0, 0, 0}, {}},
        {"fewer tokens", {5, 0, 64, 1}, {}},
        {"as captured, again", {}, {}},
    };
    for (const char* type : {"bf16", "f32"}) {
        const std::string io = type;
        replay("fwd:lens=100+37+0+163,hk2,hv4," + io + ",g=published,h0", lengths);
        replay("fwd:lens=100+37+0+163,t320,hk2,hv4,k64,v96," + io + ",h0,layout=vk,l2norm,keys=raw,gate=raw", lengths);
        replay("bwd:lens=100+37+0+163,hk2,hv4," + io + ",g=published,h0", lengths);
    }
    replay("fwd:lens=100+37+0+163,hk2,hv4,bf16,h0,idx=i64,ckpt=chunk", {lengths[0], lengths[1], lengths[2]});
    replay("fwd:lens=100+37+0+163,hk2,hv4,bf16,h0,split=3,ckpt=every:50", lengths);
    replay("bwd:lens=100+37+0+163,hk2,hv4,bf16,h0,split=2", lengths);
    replay("fwd:b3,t130,hk2,hv4,bf16,h0", {lengths[0]});

    const std::vector<Change> slots = {
        {"as captured", {}, {}},
        {"other slots", {}, {8, 2, 0, 5}},
        {"padding rows", {}, {-1, 3, -1, 7}},
        {"nothing but padding rows", {}, {-1, -1, -1, -1}},
        {"slots beyond the pool", {}, {9, 3, 1000000, 7}},
    };
    std::vector<Change> both = slots;
    both.push_back({"other lengths and slots", {64, 1, 0, 235}, {8, 2, 0, 5}});
    replay("fwd:lens=100+37+0+163,hk2,hv4,bf16,pool=9,state=bf16", both);
    for (const char* state : {"f32", "bf16"}) {
        for (const char* layout : {"kv", "vk"}) {
            const std::string tail = std::string(",hk2,hv4,bf16,pool=9,state=") + state + ",layout=" + layout;
            replay("dec:b4,t1" + tail, slots);
            replay("dec:b4,t4" + tail, slots);
            replay("dec:b4,t3,verify=buffer" + tail, slots);
            replay("dec:lens=1+16+0+3" + tail, {{"as captured", {}, {}},
                                                {"other lengths", {16, 0, 3, 1}, {}},
                                                {"nothing but empty ones", {0, 0, 0, 0}, {}}});
        }
    }
    replay("dec:b4,t3,hk2,hv4,bf16,pool=16,verify=slots",
           {{"as captured", {}, {}}, {"other slots", {}, {0, 1, 2, 15, 14, 13, 4, -1, 5, -1, 6, 7}}});
}

}  // namespace

int main() { return run("graph_replay", body); }
