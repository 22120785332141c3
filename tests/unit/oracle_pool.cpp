// Which states forward() reads and writes: pools, padding rows, flags, empty sequences, checkpoints, padded tokens.
#include "dense_model.hpp"

namespace flashqla::test {
namespace {

void check_pool(const Integers& slots, PadRule rule, std::int64_t pool_slots, const Integers& lengths) {
    Problem p = small_problem(0, 1, 2, 4, 3);
    p.pad_rule = rule;
    Layer layer(p, lengths);
    GuardedPool pool(p, pool_slots);
    std::fill(layer.o.begin(), layer.o.end(), NAN);
    ForwardCall call = layer.forward_call();
    call.initial_state = call.final_state = pool.ref(p);
    call.state_indices = index_ref(slots);
    run_oracle(call, Pass::forward);

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

TEST(OraclePool, PaddingRowsTouchNothing) {
    const Integers slots = {3, -1, 5, -1, 2, 7, 0, -1};
    for (PadRule rule : {PadRule::negative, PadRule::non_positive}) {
        check_pool(slots, rule, 8, {1, 1, 1, 1, 1, 1, 1, 1});
        check_pool(slots, rule, 8, {3, 2, 1, 0, 5, 0, 4, 1});
    }
}
TEST(OraclePool, FullPoolWithPads) { check_pool({2, -1, 0, 1, -7, 3}, PadRule::negative, 4, {2, 2, 3, 1, 4, 2}); }
TEST(OraclePool, FewRowsOfALargePool) { check_pool({999, 3, 500, 7}, PadRule::negative, 1000, {2, 1, 3, 4}); }

TEST(OraclePool, ReadAndWriteSlotsDiffer) {
    Layer layer(small_problem(0, 1, 2, 4, 3), {3, 2, 0, 4});
    const Problem& p = layer.p;
    GuardedPool pool(p, 9);
    const Integers reads = {1, 2, 3, 2}, writes = {5, -1, 7, 8};  // two rows read slot 2, row 1 writes nowhere
    ForwardCall call = layer.forward_call();
    call.initial_state = call.final_state = pool.ref(p);
    call.state_indices = index_ref(reads);
    call.state_indices_out = index_ref(writes);
    run_oracle(call, Pass::forward);
    for (std::int64_t n = 0; n < 4; ++n) {
        const Layer single = alone(layer, n, pool.slot_before(reads[n]));
        EXPECT_TRUE(same_bits(output_of(layer, n), single.o));
        if (writes[n] >= 0) {
            EXPECT_TRUE(same_bits(pool.slot(writes[n]), single.final_state)) << n;
        }
    }
    EXPECT_TRUE(same_bits(pool.slot(7), pool.slot_before(3)));  // empty sequence: a copy
    pool.expect_only({5, 7, 8});
}

TEST(OraclePool, FlagsSelectZerosAndNaNStaysInItsSlot) {
    Layer layer(small_problem(0, 1, 2, 4, 3), {3, 0, 2, 2});
    const std::int64_t size = state_size(layer.p);
    for (std::int64_t n : {0, 1, 3}) std::fill_n(layer.initial_state.begin() + n * size, size, NAN);
    const std::vector<std::int32_t> words = {0, 0, 1, 0};
    const std::vector<std::uint8_t> bytes = {0, 0, 1, 0};
    for (const IndexRef& flags :
         {IndexRef{words.data(), DType::i32, 4, 1, 1, 1}, IndexRef{bytes.data(), DType::u8, 4, 1, 1, 1}}) {
        ForwardCall call = layer.forward_call();
        call.has_initial_state = flags;
        run_oracle(call, Pass::forward);
        for (std::int64_t n = 0; n < 4; ++n) {
            const Doubles zeros(static_cast<std::size_t>(size), 0.0);
            const Layer single = alone(layer, n, n == 2 ? row_of(layer.initial_state, n, size) : zeros);
            EXPECT_TRUE(same_bits(output_of(layer, n), single.o)) << n;
            EXPECT_TRUE(same_bits(row_of(layer.final_state, n, size), single.final_state)) << n;
        }
    }
}

TEST(OraclePool, EmptySequencesKeepTheirState) {
    Layer layer(small_problem(0, 1, 2, 4, 3), {0, 64, 0, 64, 1, 200, 0});
    layer.forward();
    const std::int64_t size = state_size(layer.p);
    for (std::int64_t n = 0; n < layer.count; ++n) {
        const Layer single = alone(layer, n, row_of(layer.initial_state, n, size));
        EXPECT_TRUE(same_bits(output_of(layer, n), single.o)) << n;
        EXPECT_TRUE(same_bits(row_of(layer.final_state, n, size), single.final_state)) << n;
        if (layer.length(n) == 0) {
            EXPECT_TRUE(same_bits(row_of(layer.final_state, n, size), row_of(layer.initial_state, n, size)));
        }
    }
    ForwardCall call = layer.forward_call();
    call.initial_state = StateRef{};
    std::fill(layer.final_state.begin(), layer.final_state.end(), NAN);
    run_oracle(call, Pass::forward);
    EXPECT_TRUE(all_zero(row_of(layer.final_state, 0, size)));
    EXPECT_TRUE(all_zero(row_of(layer.final_state, 6, size)));
    for (double x : layer.final_state) EXPECT_TRUE(std::isfinite(x));
}

TEST(OraclePool, NoTokensAtAll) {
    Layer packed(small_problem(0, 1, 2, 4, 3), {0, 0, 0});
    packed.forward();
    packed.backward();
    EXPECT_EQ(packed.final_state, packed.initial_state);
    EXPECT_EQ(packed.d_initial_state, packed.d_final_state);
    Problem p = small_problem(0, 1, 2, 4, 3);
    p.batch = 2;
    Layer fixed(p);
    fixed.forward();
    fixed.backward();
    EXPECT_EQ(fixed.final_state, fixed.initial_state);
    EXPECT_EQ(fixed.d_initial_state, fixed.d_final_state);
}

TEST(OraclePool, TokensPastTheLastSequenceAreZero) {
    Layer layer(small_problem(300, 1, 2, 4, 3), {37, 91});
    for (Doubles* x : {&layer.q, &layer.k, &layer.v, &layer.g, &layer.beta, &layer.d_o}) {
        const std::size_t row = x->size() / 300;
        std::fill(x->begin() + static_cast<std::ptrdiff_t>(128 * row), x->end(), NAN);
    }
    std::fill(layer.o.begin(), layer.o.end(), NAN);
    layer.forward();
    layer.backward();
    for (const Doubles* x : {&layer.o, &layer.d_q, &layer.d_k, &layer.d_v, &layer.d_g, &layer.d_beta}) {
        const std::size_t row = x->size() / 300;
        for (std::size_t i = 0; i < x->size(); ++i) {
            ASSERT_TRUE(i < 128 * row ? std::isfinite((*x)[i]) : (*x)[i] == 0.0) << i / row;
        }
    }
}

TEST(OraclePool, PackedEqualsSeparateInBits) {
    Layer layer(small_problem(0, 2, 4, 4, 3), {37, 91});
    layer.forward();
    const std::int64_t size = state_size(layer.p);
    for (std::int64_t n : {0, 1}) {
        EXPECT_TRUE(same_bits(output_of(layer, n), alone(layer, n, row_of(layer.initial_state, n, size)).o));
    }
}

// The state after `done` tokens of a sequence: the final state of its prefix.
Doubles prefix_state(const Layer& layer, std::int64_t n, std::int64_t done) {
    Layer cut = alone(layer, n, row_of(layer.initial_state, n, state_size(layer.p)));
    cut.p.tokens = done;
    cut.forward();
    return cut.final_state;
}

struct CheckpointRow {
    std::int64_t sequence, token;
};

void check_checkpoints(Layer& layer, ForwardCall& call, const std::vector<CheckpointRow>& expected,
                       const Integers& list = {}) {
    const std::int64_t size = state_size(layer.p), rows = static_cast<std::int64_t>(expected.size());
    Doubles memory(static_cast<std::size_t>((rows + 1) * size), NAN);
    call.checkpoints = state_ref(memory.data(), kF64, layer.p, rows + 1);
    call.checkpoint_list = index_ref(list, 2);
    run_oracle(call, Pass::forward);
    for (std::int64_t r = 0; r <= rows; ++r) {
        const Doubles found = row_of(memory, r, size);
        if (r == rows || expected[r].sequence < 0) {
            for (double x : found) EXPECT_TRUE(std::isnan(x)) << "row " << r << " is nobody's";
        } else {
            EXPECT_TRUE(same_bits(found, prefix_state(layer, expected[r].sequence, expected[r].token))) << "row " << r;
        }
    }
}

TEST(OracleCheckpoints, ChunkStarts) {
    Problem p = small_problem(0, 1, 2, 4, 3);
    p.checkpoints = Checkpoints::chunk_starts;
    Layer layer(p, {1, 0, 64, 65, 130, 64});
    ForwardCall call = layer.forward_call();
    check_checkpoints(layer, call, {{0, 0}, {2, 0}, {3, 0}, {3, 64}, {4, 0}, {4, 64}, {4, 128}, {5, 0}});
}

TEST(OracleCheckpoints, EveryN) {
    Problem p = small_problem(0, 1, 2, 4, 3);
    p.checkpoints = Checkpoints::every_n;
    p.checkpoint_every = 5;
    Layer layer(p, {4, 5, 0, 11});
    ForwardCall call = layer.forward_call();
    check_checkpoints(layer, call, {{1, 5}, {3, 5}, {3, 10}});
}

TEST(OracleCheckpoints, Listed) {
    Problem p = small_problem(0, 1, 2, 4, 3);
    p.checkpoints = Checkpoints::listed;
    Layer layer(p, {4, 5, 0, 11});
    ForwardCall call = layer.forward_call();
    check_checkpoints(layer, call, {{3, 7}, {-1, 0}, {0, 0}, {0, 4}, {2, 0}, {3, 7}, {3, 11}},
                      {3, 7, -1, 0, 0, 0, 0, 4, 2, 0, 3, 7, 3, 11});
}

TEST(OracleCheckpoints, FixedLengthCountsBatchRows) {
    Problem p = small_problem(70, 1, 2, 4, 3);
    p.batch = 2;
    p.checkpoints = Checkpoints::chunk_starts;
    Layer layer(p);
    ForwardCall call = layer.forward_call();
    check_checkpoints(layer, call, {{0, 0}, {0, 64}, {1, 0}, {1, 64}});
}

TEST(OracleCheckpoints, OfAPaddingRowAreZero) {
    Problem p = small_problem(0, 1, 2, 4, 3);
    p.checkpoints = Checkpoints::chunk_starts;
    Layer layer(p, {3, 70});
    const Integers slots = {1, -1};
    Doubles memory(static_cast<std::size_t>(3 * state_size(p)), NAN);
    ForwardCall call = layer.forward_call();
    call.state_indices = index_ref(slots);
    call.checkpoints = state_ref(memory, p);
    run_oracle(call, Pass::forward);
    for (std::int64_t r : {1, 2}) EXPECT_TRUE(all_zero(row_of(memory, r, state_size(p))));
}

}  // namespace
}  // namespace flashqla::test
