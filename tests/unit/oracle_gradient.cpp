// The oracle's gradients against finite differences of its own forward pass, in double.
#include <tuple>

#include "dense_model.hpp"

namespace flashqla::test {
namespace {

// Fourth-order central difference: error about h^4 f^(5) / 30 + epsilon f / h.
double derivative(Layer& layer, double& x) {
    const double at = x, h = 4e-4;
    const auto loss = [&](double offset) {
        x = at + offset;
        return layer.loss();
    };
    const double far = loss(2 * h) - loss(-2 * h), near = loss(h) - loss(-h);
    x = at;
    return (8 * near - far) / (12 * h);
}

// At most `limit` coordinates of each tensor, spread evenly; the error in units of the tensor's largest gradient.
void check_gradients(Layer& layer, std::size_t limit, double tolerance) {
    layer.backward();
    const std::tuple<const char*, Doubles*, Doubles*> tensors[] = {
        {"d_q", &layer.q, &layer.d_q},
        {"d_k", &layer.k, &layer.d_k},
        {"d_v", &layer.v, &layer.d_v},
        {"d_g", &layer.g, &layer.d_g},
        {"d_beta", &layer.beta, &layer.d_beta},
        {"d_A_log", &layer.A_log, &layer.d_A_log},
        {"d_dt_bias", &layer.dt_bias, &layer.d_dt_bias},
        {"d_initial_state", &layer.initial_state, &layer.d_initial_state},
    };
    for (const auto& [name, input, gradient] : tensors) {
        if (input->empty()) continue;
        const std::size_t stride = (input->size() + limit - 1) / limit;
        Doubles expected, found;
        for (std::size_t i = 0; i < input->size(); i += stride) {
            expected.push_back(derivative(layer, (*input)[i]));
            found.push_back((*gradient)[i]);
        }
        EXPECT_LT(relative_error(found, expected), tolerance) << name;
    }
}

enum class Beta { absent, value, value_twice, logit, logit_twice };
enum class Group { one, three, three_tiled };
enum class Length { one, five, seventy, packed };

class Gradients : public testing::TestWithParam<std::tuple<Gate, Beta, bool, Group, Length>> {};

TEST_P(Gradients, EqualFiniteDifferences) {
    const auto [gate, beta, l2norm, group, length] = GetParam();
    const std::int32_t heads_k = length == Length::seventy ? 1 : 2;
    Problem p = small_problem(0, heads_k, group == Group::one ? heads_k : 3 * heads_k, 4, 3);
    p.gate = gate;
    p.beta_mode = beta == Beta::logit || beta == Beta::logit_twice ? BetaMode::logit : BetaMode::value;
    p.beta_factor = beta == Beta::value_twice || beta == Beta::logit_twice ? 2.0f : 1.0f;
    p.qk_l2norm = l2norm;
    p.l2norm_eps = 1e-2f;  // large enough to be seen
    p.grouping = group == Group::three_tiled ? Grouping::tiled : Grouping::interleaved;
    p.state_layout = l2norm ? StateLayout::vk : StateLayout::kv;
    Integers lengths;
    switch (length) {
        case Length::one: p.tokens = 1; break;
        case Length::five:
            p.tokens = 5;
            p.batch = 2;
            break;
        case Length::seventy: p.tokens = 70; break;
        case Length::packed:
            lengths = {0, 7, 0, 1, 4, 0};
            p.tokens = 15;  // three rows of padding
            break;
    }
    Layer layer(p, lengths, 11, beta != Beta::absent);
    check_gradients(layer, length == Length::seventy ? 10 : 40, 1e-8);
}

INSTANTIATE_TEST_SUITE_P(
    Oracle, Gradients,
    testing::Combine(testing::Values(Gate::none, Gate::log, Gate::raw),
                     testing::Values(Beta::absent, Beta::value, Beta::value_twice, Beta::logit, Beta::logit_twice),
                     testing::Bool(), testing::Values(Group::one, Group::three, Group::three_tiled),
                     testing::Values(Length::one, Length::five, Length::seventy, Length::packed)));

TEST(OracleGradients, EveryOutputMayBeAbsentAndDoesNotChangeTheOthers) {
    Problem p = small_problem(9, 1, 2, 4, 3);
    p.gate = Gate::raw;
    Layer layer(p);
    layer.backward();
    const Doubles d_v = layer.d_v, d_A_log = layer.d_A_log;
    BackwardCall call = layer.backward_call();
    call.d_q = call.d_k = call.d_g = call.d_beta = TokenRef{};
    call.d_dt_bias = HeadRef{};
    call.d_initial_state = StateRef{};
    run_oracle(call, Pass::backward);
    EXPECT_EQ(layer.d_v, d_v);
    EXPECT_EQ(layer.d_A_log, d_A_log);
    for (const Doubles* untouched : {&layer.d_q, &layer.d_k, &layer.d_g, &layer.d_beta, &layer.d_dt_bias}) {
        for (double x : *untouched) EXPECT_TRUE(std::isnan(x));
    }
}

TEST(OracleGradients, AbsentIncomingGradientsAreZero) {
    Layer layer(small_problem(9, 1, 2, 4, 3));
    layer.backward();
    const Doubles both = layer.d_k;
    BackwardCall call = layer.backward_call();
    call.d_final_state = StateRef{};
    run_oracle(call, Pass::backward);
    Doubles sum = layer.d_k;
    call = layer.backward_call();
    call.d_o = TokenRef{};
    run_oracle(call, Pass::backward);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += layer.d_k[i];
    EXPECT_LT(relative_error(sum, both), 1e-13);
}

TEST(OracleGradients, AbsentInitialStateIsZeros) {
    Layer layer(small_problem(9, 1, 2, 4, 3));
    layer.initial_state.assign(layer.initial_state.size(), 0.0);
    layer.backward();
    const Doubles d_k = layer.d_k, d_initial = layer.d_initial_state;
    BackwardCall call = layer.backward_call();
    call.initial_state = StateRef{};
    run_oracle(call, Pass::backward);
    EXPECT_EQ(layer.d_k, d_k);
    EXPECT_EQ(layer.d_initial_state, d_initial);
}

TEST(OracleGradients, EmptySequencesPassTheStateGradientThroughAndPaddingIsZero) {
    Problem p = small_problem(12, 1, 2, 4, 3);
    Layer layer(p, {0, 5, 0, 3, 0});
    layer.backward();
    const std::int64_t row = p.heads_v * p.dim_k * p.dim_v;
    for (std::int64_t n : {0, 2, 4}) {
        for (std::int64_t i = 0; i < row; ++i) {
            EXPECT_EQ(layer.d_initial_state[n * row + i], layer.d_final_state[n * row + i]);
        }
    }
    const auto tail_is_zero = [&](const Doubles& x) {
        for (std::size_t i = x.size() / 12 * 8; i < x.size(); ++i) EXPECT_EQ(x[i], 0.0);
        for (std::size_t i = 0; i < x.size(); ++i) EXPECT_TRUE(std::isfinite(x[i]));
    };
    for (const Doubles* x : {&layer.d_q, &layer.d_k, &layer.d_v, &layer.d_g, &layer.d_beta}) tail_is_zero(*x);
}

TEST(OracleGradients, ClosedGatesStayFinite) {
    for (Gate gate : {Gate::log, Gate::raw}) {
        Problem p = small_problem(20, 1, 2, 4, 3);
        p.gate = gate;
        Layer layer(p);
        const double sign = gate == Gate::log ? -1.0 : 1.0;
        layer.g[3] = sign * INFINITY;
        layer.g[8] = sign * 1e4;
        layer.g[9] = sign * 50;
        layer.g[17] = gate == Gate::log ? 0.0 : -INFINITY;
        layer.forward();
        layer.backward();
        for (const Doubles* x : {&layer.o, &layer.final_state, &layer.d_q, &layer.d_k, &layer.d_v, &layer.d_g,
                                 &layer.d_beta, &layer.d_A_log, &layer.d_dt_bias, &layer.d_initial_state}) {
            for (double value : *x) EXPECT_TRUE(std::isfinite(value));
        }
        EXPECT_EQ(layer.d_g[3], 0.0);
    }
}

// The states between stored ones are computed again: lengths around squares exercise every segment border.
TEST(OracleGradients, EveryLengthAgreesWithASplitRun) {
    for (std::int64_t T = 1; T <= 40; ++T) {
        Layer layer(small_problem(T, 1, 1, 3, 2), {}, 5);
        layer.backward();
        // The same sequence planned for more tokens has other segments.
        Layer longer(small_problem(61, 1, 1, 3, 2), {T, 61 - T}, 5);
        for (auto [to, from] : {std::pair{&longer.q, &layer.q},
                                {&longer.k, &layer.k},
                                {&longer.v, &layer.v},
                                {&longer.g, &layer.g},
                                {&longer.beta, &layer.beta},
                                {&longer.d_o, &layer.d_o},
                                {&longer.initial_state, &layer.initial_state},
                                {&longer.d_final_state, &layer.d_final_state}}) {
            std::copy(from->begin(), from->end(), to->begin());
        }
        longer.backward();
        for (std::size_t i = 0; i < layer.d_k.size(); ++i) ASSERT_EQ(longer.d_k[i], layer.d_k[i]) << "T = " << T;
        for (std::size_t i = 0; i < layer.d_g.size(); ++i) ASSERT_EQ(longer.d_g[i], layer.d_g[i]) << "T = " << T;
    }
}

}  // namespace
}  // namespace flashqla::test
