// What carrying states over cuts adds to their error. With beta = 0 a state only decays, so that its end is known: its
// beginning times the exponential of all gates. Each cut then takes the whole state through the carry, which has to
// leave as much of it as fp32 does; in the case tables the rounding of 16-bit inputs would hide a carry a thousand
// times worse.

#include <cmath>

#include "gpu_test.hpp"

namespace {

using namespace flashqla;
using namespace flashqla::gpu_test;

std::vector<float> floats_of(const TensorView& view) {
    std::size_t count = 1;
    for (int axis = 0; axis < view.rank; ++axis) count *= static_cast<std::size_t>(view.shape[axis]);
    std::vector<float> values(count);
    must(cudaMemcpy(values.data(), view.data, 4 * count, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return values;
}

// `left`: of every state, at the end. Errors are relative, of a head's whole state.
void check(const std::string& line, double left, double most) {
    const std::unique_ptr<Setup> setup = Setup::make(line);
    if (!setup) return;
    setup->reset();
    setup->eager(line);
    const ForwardArgs& args = setup->instance().forward;
    const std::vector<float> begin = floats_of(args.initial_state), end = floats_of(args.final_state);  // [1,Hv,K,V]
    const auto heads = static_cast<std::size_t>(args.final_state.shape[1]), each = end.size() / heads;
    for (std::size_t head = 0; head < heads; ++head) {
        double error = 0, norm = 0;
        for (std::size_t i = head * each; i < (head + 1) * each; ++i) {
            const double expected = left * begin[i];
            error += (end[i] - expected) * (end[i] - expected);
            norm += expected * expected;
        }
        const double relative = std::sqrt(error / norm);
        // NOTE: NaN has to fail.
        expect(norm > 0 && relative <= most,
               line + ", head " + std::to_string(head) + ": relative error " + std::to_string(relative));
    }
}

void body() {
    constexpr int kTokens = 1100;
    constexpr double kOfCarry = 1e-6, kWithDecays = 1e-5;  // gates are summed and exponentials taken in each segment
    for (const char* sizes : {"hk1,hv2", "hk1,hv1,k100,v130,layout=vk"}) {
        for (const int cuts : {1, 8}) {
            const std::string line =
                "fwd:t" + std::to_string(kTokens) + "," + sizes + ",bf16,beta=0,h0,split=" + std::to_string(cuts + 1);
            check(line + ",g=zero", 1.0, kOfCarry);
            check(line + ",g=-0.001", std::exp(-0.001 * kTokens), kWithDecays);
        }
    }
}

}  // namespace

int main() { return run("carry", body); }
