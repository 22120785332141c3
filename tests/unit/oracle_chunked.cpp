// Two formulations that share no code, the token recurrence and the chunk algebra, pin each other.
#include <tuple>

#include "chunked_model.hpp"
#include "dense_model.hpp"

namespace flashqla::test {
namespace {

// Rows of one head of a [B*T, heads, size] tensor.
Matrix head_rows(const Doubles& x, std::int64_t first, std::int64_t length, std::int64_t heads, std::int64_t h,
                 std::int64_t size) {
    return Matrix::make(length, size, [&](auto t, auto i) { return x[((first + t) * heads + h) * size + i]; });
}
Matrix state_matrix(const Layer& layer, const Doubles& x, std::int64_t n, std::int64_t h) {
    const Problem& p = layer.p;
    return Matrix::make(p.dim_k, p.dim_v, [&](auto k, auto v) {
        const std::int64_t inner = p.state_layout == StateLayout::kv ? k * p.dim_v + v : v * p.dim_k + k;
        return x[(n * p.heads_v + h) * p.dim_k * p.dim_v + inner];
    });
}

ChunkedInputs head_inputs(const Layer& layer, std::int64_t n, std::int32_t h) {
    const Problem& p = layer.p;
    const std::int64_t first = layer.first(n), T = layer.length(n);
    const std::int32_t ratio = p.heads_v / p.heads_k;
    const std::int32_t hk = p.grouping == Grouping::interleaved ? h / ratio : h % p.heads_k;
    ChunkedInputs in;
    in.Q = head_rows(layer.q, first, T, p.heads_k, hk, p.dim_k);
    in.K = head_rows(layer.k, first, T, p.heads_k, hk, p.dim_k);
    in.V = head_rows(layer.v, first, T, p.heads_v, h, p.dim_v);
    in.g =
        layer.g.empty() ? Doubles(static_cast<std::size_t>(T), 0.0) : head_rows(layer.g, first, T, p.heads_v, h, 1).x;
    in.beta = layer.beta.empty() ? Doubles(static_cast<std::size_t>(T), 1.0)
                                 : head_rows(layer.beta, first, T, p.heads_v, h, 1).x;
    in.S0 = state_matrix(layer, layer.initial_state, n, h);
    in.scale = p.scale;
    return in;
}

void expect_close(const Doubles& found, const Doubles& expected, double tolerance, const char* name) {
    EXPECT_LT(relative_error(found, expected), tolerance) << name;
}

constexpr double kForwardTolerance = 1e-12, kBackwardTolerance = 1e-11;

// factor: for inputs that cost the chunked form digits.
void compare(Layer& layer, std::int64_t chunk, double factor = 1.0) {
    const double forward_tolerance = factor * kForwardTolerance, backward_tolerance = factor * kBackwardTolerance;
    const Problem& p = layer.p;
    layer.forward();
    layer.backward();
    for (std::int64_t n = 0; n < layer.count; ++n) {
        const std::int64_t first = layer.first(n), T = layer.length(n);
        if (T == 0) continue;
        for (std::int32_t hk = 0; hk < p.heads_k; ++hk) {
            Matrix dQ(T, p.dim_k), dK(T, p.dim_k);  // summed over the group
            for (std::int32_t h = 0; h < p.heads_v; ++h) {
                const bool ours =
                    p.grouping == Grouping::interleaved ? h / (p.heads_v / p.heads_k) == hk : h % p.heads_k == hk;
                if (!ours) continue;
                SCOPED_TRACE("sequence " + std::to_string(n) + ", head " + std::to_string(h));
                const ChunkedInputs in = head_inputs(layer, n, h);
                const ChunkedForward forward = chunked_forward(in, chunk);
                expect_close(head_rows(layer.o, first, T, p.heads_v, h, p.dim_v).x, forward.O.x, forward_tolerance,
                             "o");
                const Matrix S_end = state_matrix(layer, layer.final_state, n, h);
                expect_close(S_end.x, forward.S_end.x, forward_tolerance, "final_state");
                expect_close(S_end.x, state_only(in, chunk).x, forward_tolerance, "final_state, state only");

                const Matrix dO = head_rows(layer.d_o, first, T, p.heads_v, h, p.dim_v);
                const Matrix D_end = state_matrix(layer, layer.d_final_state, n, h);
                const ChunkedBackward backward = chunked_backward(in, dO, D_end, chunk);
                dQ = dQ + backward.dQ;
                dK = dK + backward.dK;
                expect_close(head_rows(layer.d_v, first, T, p.heads_v, h, p.dim_v).x, backward.dV.x, backward_tolerance,
                             "d_v");
                if (!layer.g.empty()) {
                    expect_close(head_rows(layer.d_g, first, T, p.heads_v, h, 1).x, backward.dg, backward_tolerance,
                                 "d_g");
                }
                if (!layer.beta.empty()) {
                    expect_close(head_rows(layer.d_beta, first, T, p.heads_v, h, 1).x, backward.dbeta,
                                 backward_tolerance, "d_beta");
                }
                const Matrix D_start = state_matrix(layer, layer.d_initial_state, n, h);
                expect_close(D_start.x, backward.D_start.x, backward_tolerance, "d_initial_state");
                expect_close(D_start.x, state_gradient_only(in, dO, D_end, chunk).x, backward_tolerance,
                             "d_initial_state, state only");
            }
            expect_close(head_rows(layer.d_q, first, T, p.heads_k, hk, p.dim_k).x, dQ.x, backward_tolerance, "d_q");
            expect_close(head_rows(layer.d_k, first, T, p.heads_k, hk, p.dim_k).x, dK.x, backward_tolerance, "d_k");
        }
    }
}

class Chunked : public testing::TestWithParam<std::tuple<std::int64_t, std::int64_t>> {};

TEST_P(Chunked, EqualsTheRecurrence) {
    const auto [T, chunk] = GetParam();
    for (Gate gate : {Gate::none, Gate::log}) {
        Problem p = small_problem(T, 1, 2, 16, 5);
        p.gate = gate;
        Layer layer(p, {}, 3 + static_cast<std::uint64_t>(T), gate == Gate::log);
        compare(layer, chunk);
    }
}
INSTANTIATE_TEST_SUITE_P(Oracle, Chunked,
                         testing::Combine(testing::Values(1, 2, 7, 8, 9, 63, 64, 65, 130, 200),
                                          testing::Values(8, 64)));

TEST(OracleChunked, GroupsLayoutsAndPackedSequences) {
    for (Grouping grouping : {Grouping::interleaved, Grouping::tiled}) {
        Problem p = small_problem(150, 2, 6, 12, 20);
        p.grouping = grouping;
        p.state_layout = grouping == Grouping::tiled ? StateLayout::vk : StateLayout::kv;
        Layer layer(p, {0, 70, 0, 1, 64, 5, 0}, 21);
        compare(layer, 8);
        compare(layer, 64);
    }
}

TEST(OracleChunked, StrongAndOpenGatesMixed) {
    Problem p = small_problem(140, 1, 3, 8, 6);
    Layer layer(p, {}, 31);
    const double gates[] = {0.0, -1e-3, -50.0, -1000.0, -1e4, -0.5};
    for (std::size_t i = 0; i < layer.g.size(); ++i) layer.g[i] = gates[i * 7 % 6];
    // The running sum of such gates reaches -1e5, where a double's last digit is 1e-11: exp(gamma_i - gamma_j) is worth
    // no more. The recurrence, which never adds gates up, keeps all digits.
    compare(layer, 64, 100.0);
}

// The hardest inverse: every key of a chunk is the same unit vector. beta = 2 makes each step a reflection.
TEST(OracleChunked, IdenticalKeys) {
    for (double beta : {1.0, 2.0}) {
        for (double g : {0.0, -1e-3}) {
            Problem p = small_problem(128, 1, 1, 4, 3);
            Layer layer(p, {}, 41);
            for (std::size_t i = 0; i < layer.k.size(); ++i) layer.k[i] = i % 4 == 0 ? 0.6 : i % 4 == 3 ? 0.8 : 0.0;
            layer.beta.assign(layer.beta.size(), beta);
            layer.g.assign(layer.g.size(), g);
            compare(layer, 64);
        }
    }
}

// A sequence cut into segments, each run from zeros; end states and start gradients are then carried by M alone.
TEST(OracleChunked, SegmentsCarriedByTheTransitionMatrix) {
    Problem p = small_problem(200, 1, 1, 8, 5);
    Layer whole(p, {}, 51);
    for (double& g : whole.g) g *= 0.05;
    whole.forward();
    whole.backward();
    const ChunkedInputs all = head_inputs(whole, 0, 0);
    const Matrix dO = head_rows(whole.d_o, 0, 200, 1, 0, p.dim_v);
    const Integers cuts = {0, 70, 134, 135, 200};

    Matrix S = all.S0, D = state_matrix(whole, whole.d_final_state, 0, 0);
    const auto segment = [&](std::size_t i) {
        ChunkedInputs in = all;
        in.Q = all.Q.slice(cuts[i], cuts[i + 1]);
        in.K = all.K.slice(cuts[i], cuts[i + 1]);
        in.V = all.V.slice(cuts[i], cuts[i + 1]);
        in.g = Doubles(all.g.begin() + cuts[i], all.g.begin() + cuts[i + 1]);
        in.beta = Doubles(all.beta.begin() + cuts[i], all.beta.begin() + cuts[i + 1]);
        in.S0 = Matrix(p.dim_k, p.dim_v);
        return in;
    };
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
        const ChunkedInputs in = segment(i);
        S = state_only(in, 64) + transition(in, 64) * S;
    }
    for (std::size_t i = cuts.size() - 1; i-- > 0;) {
        const ChunkedInputs in = segment(i);
        const Matrix own = state_gradient_only(in, dO.slice(cuts[i], cuts[i + 1]), Matrix(p.dim_k, p.dim_v), 64);
        D = own + transposed(transition(in, 64)) * D;
    }
    expect_close(whole.final_state, S.x, kForwardTolerance, "final_state");
    expect_close(whole.d_initial_state, D.x, kBackwardTolerance, "d_initial_state");
}

}  // namespace
}  // namespace flashqla::test
