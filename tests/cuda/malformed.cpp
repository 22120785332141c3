// Index tensors that break their promises. The host cannot see them, so the kernels have to: nothing outside the
// tensors is read or written (run under compute-sanitizer to see reads), nothing but the result changes, no call hangs,
// and the next well formed call gives the same bits as ever. Every tensor is an allocation of exactly its size.
//
//   cuda_malformed [--verbose]        names each call before it

#include <limits>

#include "gpu_test.hpp"

namespace {

using namespace flashqla;
using namespace flashqla::gpu_test;

constexpr std::int64_t kFar = std::numeric_limits<std::int32_t>::max(),
                       kBack = std::numeric_limits<std::int32_t>::min();

// What a call is about to do, for whoever looks at a sanitizer's report.
bool verbose = false;

struct Fault {
    const char* name;
    TensorView tensor;
    std::vector<std::int64_t> numbers;
};

void check(const std::string& line, const std::function<std::vector<Fault>(cases::Instance&)>& faults_of) {
    const std::unique_ptr<Setup> setup = Setup::make(line);
    if (!setup) return;
    setup->reset();
    const std::vector<Bytes> right = setup->eager(line);
    const std::vector<bool> results = setup->results();
    for (const Fault& fault : faults_of(setup->instance())) {
        const std::string what = line + ", " + fault.name;
        if (verbose) {
            std::printf("%s\n", what.c_str());
            std::fflush(stdout);
        }
        setup->reset();
        write(fault.tensor, fault.numbers);
        const std::vector<Bytes> before = setup->fetch();
        const CudaStream stream;
        // A refusal is as good as a result.
        (void)setup->submit({stream.handle});
        stream.wait();
        const std::vector<Bytes> after = setup->fetch();
        bool kept = true;
        for (std::size_t i = 0; i < after.size(); ++i) kept = kept && (results[i] || before[i] == after[i]);
        expect(kept, what + ": an input has changed");
        setup->reset();
        expect_same(right, setup->eager(line), what + ": the call behind it");
    }
}

std::vector<Fault> bad_offsets(const TensorView& cu) {
    return {{"decreasing offsets", cu, {0, 200, 100, 250, 300}},
            {"falling below zero", cu, {0, -100, 50, 60, 300}},
            {"beyond T", cu, {0, 100, 137, 137, 100000}},
            {"one beyond T", cu, {0, 100, 137, 137, 301}},
            {"far beyond T", cu, {0, kFar, kFar, kFar, kFar}},
            {"far below", cu, {0, kBack, kBack, kBack, kBack}},
            {"back and forth", cu, {0, kFar, kBack, kFar, kBack}},
            {"not from zero", cu, {50, 100, 137, 137, 300}},
            {"from below zero", cu, {-64, 100, 137, 137, 300}},
            {"all at the end", cu, {300, 300, 300, 300, 300}},
            {"all beyond the end", cu, {1000, 2000, 3000, 4000, 5000}}};
}
std::vector<Fault> bad_slots(const TensorView& slots, std::size_t count) {
    const auto all = [&](std::int64_t slot) { return std::vector<std::int64_t>(count, slot); };
    std::vector<std::int64_t> mixed = all(0);
    const std::int64_t values[] = {9, -2, kFar, kBack};
    for (std::size_t i = 0; i < count; ++i) mixed[i] = values[i % 4];
    return {{"slots at the pool's size", slots, all(9)},
            {"slots far beyond the pool", slots, all(kFar)},
            {"slots far below zero", slots, all(kBack)},
            {"slots of all kinds", slots, mixed}};
}
void append(std::vector<Fault>& to, const std::vector<Fault>& more) { to.insert(to.end(), more.begin(), more.end()); }

void body() {
    for (const char* options : {"k64,bf16,h0", "k64,f32,h0", "k64,bf16,h0,split=3", "k128,bf16,h0,split=3"}) {
        const std::string tail = std::string(",hk2,hv4,") + options;
        check("fwd:lens=100+37+0+163" + tail, [](cases::Instance& x) { return bad_offsets(x.forward.cu_seqlens); });
        check("bwd:lens=100+37+0+163" + tail, [](cases::Instance& x) { return bad_offsets(x.backward.cu_seqlens); });
    }
    for (const char* checkpoints : {"chunk", "every:48", "0:64+3:7+1:0"}) {
        check(std::string("fwd:lens=100+37+0+163,hk2,hv4,bf16,h0,ckpt=") + checkpoints, [](cases::Instance& x) {
            std::vector<Fault> faults = bad_offsets(x.forward.cu_seqlens);
            if (x.forward.checkpoint_list.given()) {
                const TensorView& list = x.forward.checkpoint_list;
                append(faults, {{"a sequence that is not there", list, {4, 0, 3, 7, 1000000, 0}},
                                {"a token that is not there", list, {0, 101, 3, kFar, 1, -5}},
                                {"a sequence far below", list, {kBack, kBack, -1, kFar, kFar, kFar}}});
            }
            return faults;
        });
    }
    for (const char* split : {"", ",split=3"}) {
        const std::string name = "fwd:lens=100+37+0+163,hk2,hv4,bf16,pool=9,outslots=1+2+3+4,slots=5+6+7+8";
        check(name + split, [](cases::Instance& x) {
            std::vector<Fault> faults = bad_slots(x.forward.state_indices, 4);
            append(faults, bad_slots(x.forward.state_indices_out, 4));
            append(faults, bad_offsets(x.forward.cu_seqlens));
            return faults;
        });
    }
    check("fwd:lens=1+2+0+297,drows=3,hk2,hv4,bf16,h0",
          [](cases::Instance& x) { return bad_offsets(x.forward.cu_seqlens); });
    for (const char* layout : {"kv", "vk"}) {
        const std::string tail = std::string(",hk2,hv4,bf16,pool=9,layout=") + layout;
        check("dec:b4,t1" + tail, [](cases::Instance& x) { return bad_slots(x.decode.state_indices, 4); });
        check("dec:b4,t4,outslots=1+2+3+4,slots=5+6+7+8" + tail, [](cases::Instance& x) {
            std::vector<Fault> faults = bad_slots(x.decode.state_indices, 4);
            append(faults, bad_slots(x.decode.state_indices_out, 4));
            return faults;
        });
        check("dec:lens=1+16+0+3" + tail, [](cases::Instance& x) {
            const TensorView& cu = x.decode.cu_seqlens;
            return std::vector<Fault>{{"decreasing offsets", cu, {0, 17, 1, 20, 3}},
                                      {"longer than a row may be", cu, {0, 20, 20, 20, 20}},
                                      {"far beyond T", cu, {0, kFar, kFar, kFar, kFar}},
                                      {"back and forth", cu, {kBack, kFar, kBack, kFar, kBack}}};
        });
    }
    check("dec:b3,t3,verify=slots,hk2,hv4,bf16,pool=9,accepted=1+2+3", [](cases::Instance& x) {
        std::vector<Fault> faults = bad_slots(x.decode.state_indices, 9);
        append(faults, {{"accepted beyond the row", x.decode.num_accepted, {4, 0, kFar}},
                        {"accepted far below", x.decode.num_accepted, {kBack, -1, kFar}}});
        return faults;
    });
    check("dec:b4,t4,verify=buffer,hk2,hv4,bf16,pool=9,buf=3+1+0+2,accepted=1+2+3+4", [](cases::Instance& x) {
        std::vector<Fault> faults = bad_slots(x.decode.state_indices, 4);
        append(faults,
               {{"buffer rows that are not there", x.decode.intermediate_indices, {4, kFar, -2, kBack}},
                {"accepted beyond the row", x.commit.accepted, {5, 0, kFar, kBack}},
                {"slots to commit beyond the pool", x.commit.state_indices, {9, kFar, -2, kBack}},
                {"buffer rows to commit that are not there", x.commit.intermediate_indices, {4, kFar, -2, kBack}}});
        return faults;
    });
    check("dec:b2,t4,verify=tree,hk2,hv4,bf16", [](cases::Instance& x) {
        const TensorView& parents = x.decode.parent_tokens;
        return std::vector<Fault>{{"parents behind their children", parents, {1, 2, 3, 3, 3, 3, 3, 3}},
                                  {"parents far away", parents, {kFar, kBack, kFar, 16, 4, 5, -7, kFar}}};
    });
}

}  // namespace

int main(int count, char** words) {
    verbose = count > 1 && std::string(words[1]) == "--verbose";
    return run("malformed", body);
}
