// decode() against forward(): short runs, pools, both contracts of speculative verification, trees.
#include "dense_model.hpp"

namespace flashqla::test {
namespace {

DecodeCall decode_call(Layer& layer, const StateRef& pool) {
    DecodeCall call;
    layer.fill_inputs(call);
    call.state = pool;
    call.o = token_ref(layer.o, layer.p.tokens, layer.p.heads_v, layer.p.dim_v);
    std::fill(layer.o.begin(), layer.o.end(), NAN);
    return call;
}

Problem rows_problem(std::int64_t rows, std::int64_t tokens) {
    Problem p = small_problem(tokens, 1, 2, 4, 3);
    p.batch = rows;
    return p;
}

// Row n cut after `tokens` tokens and started from `state`.
Layer prefix(const Layer& layer, std::int64_t n, std::int64_t tokens, const Doubles& state) {
    Layer cut = alone(layer, n, state);
    cut.p.tokens = tokens;
    cut.forward();
    return cut;
}

TEST(OracleDecode, EqualsForwardInEveryMode) {
    for (int mode = 0; mode < 24; ++mode) {
        for (std::int64_t T : {1, 3, 16}) {
            Problem p = small_problem(T, 2, 6, 4, 3);
            p.batch = 3;
            p.gate = static_cast<Gate>(mode % 3);
            p.beta_mode = mode / 3 % 2 ? BetaMode::logit : BetaMode::value;
            p.qk_l2norm = mode / 6 % 2;
            p.grouping = mode / 12 ? Grouping::tiled : Grouping::interleaved;
            p.state_layout = mode % 2 ? StateLayout::vk : StateLayout::kv;
            Layer layer(p);
            layer.forward();
            const Doubles o = layer.o;
            Doubles pool = layer.initial_state;
            run_oracle(decode_call(layer, state_ref(pool, p)), Pass::decode);
            EXPECT_TRUE(same_bits(layer.o, o)) << mode;
            EXPECT_TRUE(same_bits(pool, layer.final_state)) << mode;
        }
    }
}

TEST(OracleDecode, PackedRowsWithEmptyOnesAndATail) {
    Layer layer(small_problem(30, 1, 2, 4, 3), {1, 0, 16, 5, 0, 1});
    layer.forward();
    const Doubles o = layer.o;
    Doubles pool = layer.initial_state;
    run_oracle(decode_call(layer, state_ref(pool, layer.p)), Pass::decode);
    EXPECT_TRUE(same_bits(layer.o, o));  // o ends in seven rows of zeros
    EXPECT_TRUE(same_bits(pool, layer.final_state));
    EXPECT_EQ(layer.o.back(), 0.0);
}

TEST(OracleDecode, TokenByTokenEqualsARun) {
    Layer layer(rows_problem(1, 40));
    layer.forward();
    const Doubles o = layer.o;
    Doubles pool = layer.initial_state;
    for (std::int64_t t = 0; t < 40; ++t) {
        DecodeCall call = decode_call(layer, state_ref(pool, layer.p));
        call.problem.tokens = 1;
        for (TokenRef* ref : {&call.q, &call.k, &call.v, &call.g, &call.beta, &call.o}) {
            ref->data = static_cast<double*>(ref->data) + t * ref->token;
        }
        run_oracle(call, Pass::decode);
        for (std::int64_t i = 0; i < call.o.token; ++i)
            ASSERT_EQ(layer.o[t * call.o.token + i], o[t * call.o.token + i]);
    }
    EXPECT_TRUE(same_bits(pool, layer.final_state));
}

void check_pool(const Integers& slots, PadRule rule, std::int64_t pool_slots, std::int64_t tokens) {
    Problem p = rows_problem(static_cast<std::int64_t>(slots.size()), tokens);
    p.pad_rule = rule;
    Layer layer(p);
    GuardedPool pool(p, pool_slots);
    DecodeCall call = decode_call(layer, pool.ref(p));
    call.state_indices = index_ref(slots);
    run_oracle(call, Pass::decode);
    Integers written;
    for (std::int64_t n = 0; n < layer.count; ++n) {
        if (is_padding(rule, slots[n])) {
            EXPECT_TRUE(all_zero(output_of(layer, n))) << "row " << n;
            continue;
        }
        written.push_back(slots[n]);
        const Layer single = alone(layer, n, pool.slot_before(slots[n]));
        EXPECT_TRUE(same_bits(output_of(layer, n), single.o)) << "row " << n;
        EXPECT_TRUE(same_bits(pool.slot(slots[n]), single.final_state)) << "row " << n;
    }
    pool.expect_only(written);
}

TEST(OracleDecode, PaddingRowsTouchNothing) {
    for (PadRule rule : {PadRule::negative, PadRule::non_positive}) {
        for (std::int64_t tokens : {1, 4}) check_pool({3, -1, 5, -1, 2, 7, 0, -1}, rule, 8, tokens);
    }
}
TEST(OracleDecode, FullPoolWithPads) { check_pool({2, -1, 0, 1, -7, 3}, PadRule::negative, 4, 1); }
TEST(OracleDecode, FewRowsOfALargePool) { check_pool({999, 3, 500, 7}, PadRule::negative, 1000, 1); }

TEST(OracleDecode, WriteSlotsAndFlags) {
    Layer layer(rows_problem(3, 2));
    const Problem& p = layer.p;
    GuardedPool pool(p, 8);
    std::fill_n(pool.memory.begin() + (1 + 1) * pool.size, pool.size, NAN);  // slot 1
    pool.before = pool.memory;
    const Integers reads = {1, 2, 3}, writes = {5, 6, -1};
    const std::vector<std::uint8_t> flags = {0, 1, 1};
    DecodeCall call = decode_call(layer, pool.ref(p));
    call.state_indices = index_ref(reads);
    call.state_indices_out = index_ref(writes);
    call.has_initial_state = {flags.data(), DType::u8, 3, 1, 1, 1};
    run_oracle(call, Pass::decode);
    for (std::int64_t n = 0; n < 3; ++n) {
        const Doubles zeros(static_cast<std::size_t>(pool.size), 0.0);
        const Layer single = alone(layer, n, n == 0 ? zeros : pool.slot_before(reads[n]));
        EXPECT_TRUE(same_bits(output_of(layer, n), single.o)) << n;
        if (n < 2) {
            EXPECT_TRUE(same_bits(pool.slot(writes[n]), single.final_state)) << n;
        }
    }
    pool.expect_only({5, 6});
}

// state_indices [N,S]: the start state by num_accepted, the state after token t to slot t of the row.
TEST(OracleDecode, ASlotPerToken) {
    const std::int64_t T = 3, S = 4;
    Layer layer(rows_problem(6, T));
    const Problem& p = layer.p;
    GuardedPool pool(p, 24);
    const Integers slots = {3,  9,  11, 2,    // accepted 1: starts in slot 3
                            4,  5,  -1, 6,    // accepted 2: starts in slot 5; the state after token 2 goes nowhere
                            7,  8,  10, 12,   // accepted S: starts in slot 12
                            13, 14, 15, 16,   // accepted 0: padding
                            17, 18, 19, 20,   // accepted S + 3: padding
                            0,  1,  -1, 21};  // accepted 3: the start slot is padding
    const Integers accepted = {1, 2, S, 0, S + 3, 3};
    const Integers starts = {3, 5, 12};
    DecodeCall call = decode_call(layer, pool.ref(p));
    call.state_indices = index_ref(slots, S);
    call.num_accepted = index_ref(accepted);
    run_oracle(call, Pass::decode);
    Integers written;
    for (std::int64_t n = 0; n < 3; ++n) {
        for (std::int64_t t = 0; t < T; ++t) {
            const Layer cut = prefix(layer, n, t + 1, pool.slot_before(starts[n]));
            if (t + 1 == T) {
                EXPECT_TRUE(same_bits(output_of(layer, n), cut.o)) << n;
            }
            if (slots[n * S + t] < 0) continue;
            written.push_back(slots[n * S + t]);
            EXPECT_TRUE(same_bits(pool.slot(slots[n * S + t]), cut.final_state)) << n << ", " << t;
        }
    }
    for (std::int64_t n = 3; n < 6; ++n) EXPECT_TRUE(all_zero(output_of(layer, n))) << n;
    pool.expect_only(written);
}

TEST(OracleDecode, ASlotPerTokenStartsInTheFirstByDefault) {
    Layer layer(rows_problem(1, 2));
    GuardedPool pool(layer.p, 4);
    const Integers slots = {2, 0};
    DecodeCall call = decode_call(layer, pool.ref(layer.p));
    call.state_indices = index_ref(slots, 2);
    run_oracle(call, Pass::decode);
    EXPECT_TRUE(same_bits(pool.slot(2), prefix(layer, 0, 1, pool.slot_before(2)).final_state));
    EXPECT_TRUE(same_bits(pool.slot(0), prefix(layer, 0, 2, pool.slot_before(2)).final_state));
    pool.expect_only({0, 2});
}

TEST(OracleDecode, IntermediateStates) {
    const std::int64_t T = 3, steps = 5;
    for (bool commit_state : {false, true}) {
        Layer layer(rows_problem(4, T));
        const Problem& p = layer.p;
        GuardedPool pool(p, 6);
        const Integers slots = {5, 0, -1, 3}, buffers = {2, -1, 1, 0};
        Doubles memory(static_cast<std::size_t>(4 * steps * state_size(p)), NAN);
        DecodeCall call = decode_call(layer, pool.ref(p));
        call.state_indices = index_ref(slots);
        call.intermediate_states = state_ref(memory, p, steps);
        call.intermediate_steps = steps;
        call.intermediate_indices = index_ref(buffers);
        call.commit_state = commit_state;
        run_oracle(call, Pass::decode);

        Doubles expected(memory.size(), NAN);
        Integers written;
        for (std::int64_t n : {0, 1, 3}) {
            for (std::int64_t t = 0; t < T; ++t) {
                const Layer cut = prefix(layer, n, t + 1, pool.slot_before(slots[n]));
                if (buffers[n] >= 0) {
                    std::copy(cut.final_state.begin(), cut.final_state.end(),
                              expected.begin() + (buffers[n] * steps + t) * state_size(p));
                }
                if (t + 1 < T) continue;
                EXPECT_TRUE(same_bits(output_of(layer, n), cut.o)) << n;
                if (commit_state) {
                    EXPECT_TRUE(same_bits(pool.slot(slots[n]), cut.final_state)) << n;
                }
            }
            if (commit_state) written.push_back(slots[n]);
        }
        EXPECT_TRUE(all_zero(output_of(layer, 2)));
        EXPECT_TRUE(same_bits(memory, expected));
        pool.expect_only(written);
    }
}

// A tree: token t continues from its parent. Every path from the root is a linear run of its own.
TEST(OracleDecode, TreeEqualsItsPaths) {
    const std::int64_t T = 7;
    Layer layer(rows_problem(2, T));
    const Problem& p = layer.p;
    const Integers parents = {-1, 0, 0, 1, -1, 4, 2,  //
                              -1, 0, 1, 2, 3,  4, 5};
    GuardedPool pool(p, 2);
    Doubles memory(static_cast<std::size_t>(2 * T * state_size(p)), NAN);
    DecodeCall call = decode_call(layer, pool.ref(p));
    call.intermediate_states = state_ref(memory, p, T);
    call.intermediate_steps = T;
    call.parent_tokens = index_ref(parents, T);
    call.commit_state = false;
    run_oracle(call, Pass::decode);
    pool.expect_only({});

    for (std::int64_t n = 0; n < 2; ++n) {
        for (std::int64_t t = 0; t < T; ++t) {
            Integers path;
            for (std::int64_t at = t; at >= 0; at = parents[n * T + at]) path.insert(path.begin(), at);
            // The tokens of the path, gathered into a run without a tree.
            const Layer row = alone(layer, n, pool.slot_before(n));
            Layer run = row;
            run.p.tokens = static_cast<std::int64_t>(path.size());
            for (auto [to, from] : {std::pair{&run.q, &row.q},
                                    {&run.k, &row.k},
                                    {&run.v, &row.v},
                                    {&run.g, &row.g},
                                    {&run.beta, &row.beta}}) {
                const std::int64_t size = static_cast<std::int64_t>(from->size()) / T;
                for (std::size_t i = 0; i < path.size(); ++i) {
                    std::copy_n(from->begin() + path[i] * size, size,
                                to->begin() + static_cast<std::int64_t>(i) * size);
                }
            }
            run.forward();
            const std::int64_t size = std::int64_t{p.heads_v} * p.dim_v;
            EXPECT_TRUE(same_bits(row_of(layer.o, n * T + t, size), row_of(run.o, run.p.tokens - 1, size)))
                << n << ", " << t;
            EXPECT_TRUE(same_bits(row_of(memory, n * T + t, state_size(p)), run.final_state)) << n << ", " << t;
        }
    }
}

}  // namespace
}  // namespace flashqla::test
