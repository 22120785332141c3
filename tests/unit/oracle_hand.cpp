// One case small enough to work out on paper: T = 3, K = 2, V = 1, scale 1.
//
//   S0 = (1, 2)
//   t  alpha  k       v    beta  q        Sd           S^T k  error  S'          o
//   0  1      (1, 0)  3    1     (1, 1)   (1, 2)       1      2      (3, 2)      5
//   1  1/2    (0, 1)  2    1/2   (2, 0)   (1.5, 1)     1      1      (1.5, 1.5)  3
//   2  1/2    (1, 1)  2.5  1/4   (0, 4)   (0.75, 0.75) 1.5    1      (1, 1)      4
//
// Backward with d_o = 1 everywhere and d_final_state = (1, 0). D enters a token as the gradient of S' and first takes
// the read: D += q. Then d_error = beta D^T k = d_v, d_beta = (D^T k) error, d_k = beta error D - d_error Sd,
// D -= d_error k, d_g = alpha <D, S>, D *= alpha.
//
//   t  D after read     D^T k   d_v     d_beta  d_k                 D - d_error k    <D, S>  d_g     D leaving
//   2  (1, 4)           5       1.25    5       (-0.6875, 0.0625)   (-0.25, 2.75)    3.75    1.875   (-0.125, 1.375)
//   1  (1.875, 1.375)   1.375   0.6875  1.375   (-0.09375, 0)       (1.875, 0.6875)  7       3.5     (0.9375, 0.34375)
//   0  (1.9375,1.34375) 1.9375  1.9375  3.875   (1.9375, -1.1875)   (0, 1.34375)     2.6875  2.6875  (0, 1.34375)
#include "dense_model.hpp"

namespace flashqla::test {
namespace {

Layer hand_layer() {
    Problem p = small_problem(3, 1, 1, 2, 1);
    p.scale = 1.0f;
    Layer layer(p);
    layer.initial_state = {1, 2};
    layer.q = {1, 1, 2, 0, 0, 4};
    layer.k = {1, 0, 0, 1, 1, 1};
    layer.v = {3, 2, 2.5};
    layer.g = {0.0, std::log(0.5), std::log(0.5)};
    layer.beta = {1, 0.5, 0.25};
    layer.d_o = {1, 1, 1};
    layer.d_final_state = {1, 0};
    return layer;
}

void expect_near(const Doubles& found, const Doubles& expected, const char* name) {
    ASSERT_EQ(found.size(), expected.size()) << name;
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-14) << name << "[" << i << "]";
}

TEST(OracleByHand, Forward) {
    Layer layer = hand_layer();
    layer.forward();
    expect_near(layer.o, {5, 3, 4}, "o");
    expect_near(layer.final_state, {1, 1}, "final_state");
}

TEST(OracleByHand, Backward) {
    Layer layer = hand_layer();
    layer.backward();
    expect_near(layer.d_q, {3, 2, 1.5, 1.5, 1, 1}, "d_q");
    expect_near(layer.d_k, {1.9375, -1.1875, -0.09375, 0, -0.6875, 0.0625}, "d_k");
    expect_near(layer.d_v, {1.9375, 0.6875, 1.25}, "d_v");
    expect_near(layer.d_g, {2.6875, 3.5, 1.875}, "d_g");
    expect_near(layer.d_beta, {3.875, 1.375, 5}, "d_beta");
    expect_near(layer.d_initial_state, {0, 1.34375}, "d_initial_state");
}

TEST(OracleByHand, Decode) {
    Layer layer = hand_layer();
    DecodeCall call;
    layer.fill_inputs(call);
    call.state = state_ref(layer.initial_state, layer.p);
    call.o = token_ref(layer.o, 3, 1, 1);
    run_oracle(call, Pass::decode);
    expect_near(layer.o, {5, 3, 4}, "o");
    expect_near(layer.initial_state, {1, 1}, "state");
}

// softplus(0) = log 2, so A_log = 0 gives alpha = 1/2; sigmoid(0) = 1/2; (3, 4) has length 5.
TEST(OracleByHand, RawGateLogitBetaAndL2Norm) {
    Problem p = small_problem(1, 1, 1, 2, 1);
    p.scale = 1.0f;
    p.gate = Gate::raw;
    p.beta_mode = BetaMode::logit;
    p.beta_factor = 2.0f;
    p.qk_l2norm = true;
    p.l2norm_eps = 0.0f;
    Layer layer(p);
    layer.initial_state = {2, 4};  // Sd = (1, 2)
    layer.k = {30, 40};            // (0.6, 0.8), Sd^T k = 2.2
    layer.v = {3.2};               // error 1, S' = (1.6, 2.8)
    layer.q = {0, 7};              // (0, 1)
    layer.g = {-1};
    layer.dt_bias = {1};
    layer.A_log = {0};
    layer.beta = {0};
    layer.forward();
    expect_near(layer.final_state, {1.6, 2.8}, "final_state");
    expect_near(layer.o, {2.8}, "o");
}

}  // namespace
}  // namespace flashqla::test
