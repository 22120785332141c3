// How tensors lie in memory and what rounds them: dtypes, strides, layouts, groupings; what the oracle refuses.
#include "dense_model.hpp"

namespace flashqla::test {
namespace {

// A copy of a contiguous [tokens, heads, size] tensor in another dtype and with gaps: rows start at an odd offset of
// longer rows, as slices of one packed tensor do. `values` receives what the copy can represent.
struct Strided {
    std::vector<std::uint8_t> bytes;
    TokenRef ref;
    std::int64_t rows, heads, size;

    Strided(Doubles& values, DType dtype, std::int64_t T, std::int64_t H, std::int64_t D, bool round_values = true)
        : rows(T), heads(H), size(D) {
        const std::int64_t token = H * D + 13, head = D, offset = 3;
        bytes.assign(static_cast<std::size_t>((T * token + offset) * 4), 0xff);  // NaN in every float dtype
        ref = {bytes.data() + offset * static_cast<std::int64_t>(size_of(dtype)), dtype, T * token, token, head};
        for (std::int64_t t = 0; t < T && round_values; ++t) {
            for (std::int64_t h = 0; h < H; ++h) {
                for (std::int64_t i = 0; i < D; ++i) {
                    double& x = values[(t * H + h) * D + i];
                    store_float(ref.data, dtype, ref.offset(0, t, h) + i, static_cast<float>(x));
                    x = load_float(ref.data, dtype, ref.offset(0, t, h) + i);
                }
            }
        }
    }
    Doubles values() const {
        Doubles x;
        for (std::int64_t t = 0; t < rows; ++t) {
            for (std::int64_t h = 0; h < heads; ++h) {
                for (std::int64_t i = 0; i < size; ++i) {
                    x.push_back(load_float(ref.data, ref.dtype, ref.offset(0, t, h) + i));
                }
            }
        }
        return x;
    }
};

Doubles rounded(const Doubles& x, DType dtype) {
    Doubles y = x;
    float cell = 0.0f;
    for (double& value : y) {
        store_float(&cell, dtype, 0, static_cast<float>(value));
        value = load_float(&cell, dtype, 0);
    }
    return y;
}

class Formats : public testing::TestWithParam<DType> {};

TEST_P(Formats, StridedTensorsGiveTheRoundedDoubleResult) {
    const DType dtype = GetParam();
    Problem p = small_problem(9, 2, 4, 4, 3);
    p.gate = Gate::raw;
    p.beta_mode = BetaMode::logit;
    p.qk_l2norm = true;
    Layer layer(p);
    Strided q(layer.q, dtype, 9, 2, 4), k(layer.k, dtype, 9, 2, 4), v(layer.v, dtype, 9, 4, 3);
    Strided g(layer.g, dtype, 9, 4, 1), beta(layer.beta, dtype, 9, 4, 1), d_o(layer.d_o, dtype, 9, 4, 3);
    layer.initial_state = rounded(layer.initial_state, dtype);
    layer.A_log = rounded(layer.A_log, dtype);
    layer.forward();
    layer.backward();

    Strided o(layer.o, dtype, 9, 4, 3, false);
    std::vector<std::uint8_t> state(layer.initial_state.size() * 4), A_log(layer.A_log.size() * 8);
    for (std::size_t i = 0; i < layer.initial_state.size(); ++i) {
        store_float(state.data(), dtype, static_cast<std::int64_t>(i), static_cast<float>(layer.initial_state[i]));
    }
    for (std::size_t i = 0; i < layer.A_log.size(); ++i) {
        store_float(A_log.data(), dtype, static_cast<std::int64_t>(2 * i), static_cast<float>(layer.A_log[i]));
    }
    ForwardCall forward = layer.forward_call();
    const auto inputs = [&](Inputs& in) {
        in.q = q.ref;
        in.k = k.ref;
        in.v = v.ref;
        in.g = g.ref;
        in.beta = beta.ref;
        in.A_log = {A_log.data(), dtype, 2};
    };
    inputs(forward);
    forward.o = o.ref;
    forward.initial_state = forward.final_state = state_ref(state.data(), dtype, p, 1);  // in place
    const std::vector<std::uint8_t> start = state;
    run_oracle(forward, Pass::forward);
    EXPECT_EQ(o.values(), rounded(layer.o, dtype));
    for (std::size_t i = 0; i < layer.final_state.size(); ++i) {
        EXPECT_EQ(load_float(state.data(), dtype, static_cast<std::int64_t>(i)),
                  rounded({layer.final_state[i]}, dtype)[0]);
    }

    state = start;
    const Doubles expected[] = {layer.d_q, layer.d_k, layer.d_v, layer.d_g, layer.d_beta};
    Strided d_q(layer.q, dtype, 9, 2, 4, false), d_k(layer.k, dtype, 9, 2, 4, false);
    Strided d_v(layer.v, dtype, 9, 4, 3, false), d_g(layer.g, dtype, 9, 4, 1, false);
    Strided d_beta(layer.beta, dtype, 9, 4, 1, false);
    BackwardCall backward = layer.backward_call();
    inputs(backward);
    backward.initial_state = state_ref(state.data(), dtype, p, 1);
    backward.d_o = d_o.ref;
    backward.d_q = d_q.ref;
    backward.d_k = d_k.ref;
    backward.d_v = d_v.ref;
    backward.d_g = d_g.ref;
    backward.d_beta = d_beta.ref;
    run_oracle(backward, Pass::backward);
    const Strided* found[] = {&d_q, &d_k, &d_v, &d_g, &d_beta};
    for (int i = 0; i < 5; ++i) EXPECT_EQ(found[i]->values(), rounded(expected[i], dtype)) << i;
}
INSTANTIATE_TEST_SUITE_P(Oracle, Formats, testing::Values(DType::f32, DType::f16, DType::bf16),
                         [](const auto& parameter) { return std::string(name_of(parameter.param)); });

TEST(OracleFormats, StateLayoutIsAPermutation) {
    Layer kv(small_problem(5, 1, 2, 4, 3));
    Problem p = kv.p;
    p.state_layout = StateLayout::vk;
    Layer vk(p);
    const auto at = [](std::int64_t h, std::int64_t k, std::int64_t v, bool v_first) {
        return h * 12 + (v_first ? v * 4 + k : k * 3 + v);
    };
    const auto each_element = [&](auto f) {
        for (std::int64_t h = 0; h < 2; ++h) {
            for (std::int64_t k = 0; k < 4; ++k) {
                for (std::int64_t v = 0; v < 3; ++v) f(at(h, k, v, false), at(h, k, v, true));
            }
        }
    };
    each_element([&](auto i, auto j) {
        vk.initial_state[j] = kv.initial_state[i];
        vk.d_final_state[j] = kv.d_final_state[i];
    });
    for (Layer* layer : {&kv, &vk}) {
        layer->forward();
        layer->backward();
    }
    EXPECT_TRUE(same_bits(kv.o, vk.o));
    EXPECT_TRUE(same_bits(kv.d_k, vk.d_k));
    each_element([&](auto i, auto j) {
        EXPECT_EQ(kv.final_state[i], vk.final_state[j]);
        EXPECT_EQ(kv.d_initial_state[i], vk.d_initial_state[j]);
    });
}

// A group of value heads equals separate heads whose q and k are repeated; gradients add up.
TEST(OracleFormats, GroupingEqualsRepeatedKeyHeads) {
    for (Grouping grouping : {Grouping::interleaved, Grouping::tiled}) {
        const std::int64_t T = 6, Hk = 2, Hv = 6, K = 4;
        Problem p = small_problem(T, Hk, Hv, K, 3);
        p.grouping = grouping;
        Layer grouped(p);
        p.heads_k = Hv;
        Layer repeated(p);
        repeated.v = grouped.v;
        repeated.g = grouped.g;
        repeated.beta = grouped.beta;
        const auto source = [&](std::int64_t h) { return grouping == Grouping::interleaved ? h / 3 : h % 2; };
        for (std::int64_t t = 0; t < T; ++t) {
            for (std::int64_t h = 0; h < Hv; ++h) {
                std::copy_n(grouped.q.begin() + (t * Hk + source(h)) * K, K, repeated.q.begin() + (t * Hv + h) * K);
                std::copy_n(grouped.k.begin() + (t * Hk + source(h)) * K, K, repeated.k.begin() + (t * Hv + h) * K);
            }
        }
        for (Layer* layer : {&grouped, &repeated}) {
            layer->initial_state = grouped.initial_state;
            layer->d_o = grouped.d_o;
            layer->d_final_state = grouped.d_final_state;
            layer->forward();
            layer->backward();
        }
        EXPECT_TRUE(same_bits(grouped.o, repeated.o));
        EXPECT_TRUE(same_bits(grouped.d_v, repeated.d_v));
        Doubles sum(grouped.d_k.size(), 0.0);
        for (std::int64_t t = 0; t < T; ++t) {
            for (std::int64_t h = 0; h < Hv; ++h) {
                for (std::int64_t i = 0; i < K; ++i) {
                    sum[(t * Hk + source(h)) * K + i] += repeated.d_k[(t * Hv + h) * K + i];
                }
            }
        }
        EXPECT_LT(relative_error(grouped.d_k, sum), 1e-14);
    }
}

// l2norm on = rows normalised outside and off.
TEST(OracleFormats, L2NormEqualsNormalisingOutside) {
    Problem p = small_problem(6, 2, 4, 8, 3);
    p.qk_l2norm = true;
    Layer inside(p);
    Layer outside = inside;
    outside.p.qk_l2norm = false;
    for (Doubles* x : {&outside.q, &outside.k}) {
        for (std::size_t row = 0; row < x->size(); row += 8) {
            double sum = static_cast<double>(p.l2norm_eps);
            for (std::size_t i = 0; i < 8; ++i) sum += (*x)[row + i] * (*x)[row + i];
            for (std::size_t i = 0; i < 8; ++i) (*x)[row + i] /= std::sqrt(sum);
        }
    }
    inside.forward();
    outside.forward();
    EXPECT_LT(relative_error(inside.o, outside.o), 1e-14);
}

TEST(OracleFormats, SoftplusBecomesLinearAboveTwenty) {
    Problem p = small_problem(2, 1, 1, 2, 1);
    p.gate = Gate::raw;
    Layer layer(p);
    layer.A_log = {std::log(0.01)};
    layer.dt_bias = {0.5};
    layer.g = {25.0, 900.0};  // exp(900) is infinite
    layer.v.assign(2, 0.0);
    layer.k.assign(4, 0.0);
    layer.initial_state = {1.0, 2.0};
    layer.forward();
    EXPECT_NEAR(layer.final_state[0], std::exp(-0.01 * (25.5 + 900.5)), 1e-16);
}

TEST(OracleFormats, RefusesWhatItCannotDo) {
    PlanRequest request;
    request.problem = small_problem(1, 1, 1, 2, 1);
    EXPECT_TRUE(kReferenceBackend.supports(request).ok());
    request.problem.gate = Gate::vector;
    EXPECT_FALSE(kReferenceBackend.supports(request).ok());
    request.problem.gate = Gate::log;
    request.device.type = DeviceType::cuda;
    EXPECT_FALSE(kReferenceBackend.supports(request).ok());
}

TEST(OracleFormats, BackwardMemoryGrowsWithTheRootOfT) {
    PlanRequest request;
    request.pass = Pass::backward;
    request.problem = small_problem(8192, 16, 32, 128, 128);
    const auto plan = kReferenceBackend.plan(request);
    EXPECT_LT(plan->workspace().bytes(), std::size_t{48} << 20);  // every state would be 1 GiB
    EXPECT_NE(plan->explain().find("91 tokens"), std::string::npos) << plan->explain();
}

}  // namespace
}  // namespace flashqla::test
