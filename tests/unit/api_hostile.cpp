// Random contents of every index tensor: each call ends in success or in a sentence, and touches nothing but the slots
// that its indices name. Run it under the address sanitizer to see reads too.
#include <random>

#include "api_setup.hpp"

namespace flashqla::test {
namespace {

class Hostile {
public:
    explicit Hostile(unsigned seed) : random_(seed) {}
    int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
    bool often() { return pick(0, 3) > 0; }
    bool rarely() { return pick(0, 15) == 0; }

    // Mostly in low..high, now and then far outside.
    std::vector<std::int64_t> numbers(std::int64_t count, int low, int high) {
        constexpr std::int64_t kOdd[] = {INT64_MIN, INT64_MAX, INT32_MIN, INT32_MAX, -1, 1 << 20};
        std::vector<std::int64_t> x(static_cast<std::size_t>(count));
        for (std::int64_t& value : x) value = pick(0, 40) == 0 ? kOdd[pick(0, 5)] : pick(low, high);
        return x;
    }
    // A permutation of 0..slots-1, cut short, with padding and now and then a fault.
    std::vector<std::int64_t> slots(std::int64_t count, std::int64_t of) {
        std::vector<std::int64_t> x(static_cast<std::size_t>(of));
        for (std::int64_t i = 0; i < of; ++i) x[static_cast<std::size_t>(i)] = i;
        std::shuffle(x.begin(), x.end(), random_);
        x.resize(static_cast<std::size_t>(count));
        for (std::int64_t& value : x) {
            if (pick(0, 5) == 0) value = -1;
        }
        if (rarely()) x[0] = numbers(1, -3, 12)[0];
        return x;
    }
    std::vector<std::int64_t> offsets(std::int64_t sequences, int tokens) {
        std::vector<std::int64_t> x(static_cast<std::size_t>(sequences + 1));
        for (std::int64_t& value : x) value = pick(0, tokens);
        std::sort(x.begin(), x.end());
        x[0] = 0;
        if (rarely()) x[static_cast<std::size_t>(pick(0, static_cast<int>(sequences)))] = numbers(1, -3, 20)[0];
        return x;
    }

private:
    std::mt19937 random_;
};

TensorView list(const std::vector<std::int64_t>& x) {
    return tensor(x.data(), DType::i64, {static_cast<std::int64_t>(x.size())});
}
TensorView rows(const std::vector<std::int64_t>& x, std::int64_t columns) {
    return tensor(x.data(), DType::i64, {static_cast<std::int64_t>(x.size()) / columns, columns});
}

struct Counts {
    int good = 0, refused = 0;
    void add(const Status& status) {
        (status.ok() ? good : refused) += 1;
        EXPECT_TRUE(status.ok() || status.code() == Code::invalid_argument) << status.message();
    }
    void expect_both() const {
        EXPECT_GT(good, 100);
        EXPECT_GT(refused, 100);
    }
};

// Slots that no index names must stay as they are.
void expect_untouched(const Memory& m, const std::vector<float>& before, const std::vector<std::int64_t>& written) {
    const std::ptrdiff_t size = m.Hv * m.K * m.V;
    for (std::int64_t slot = 0; slot < m.slots; ++slot) {
        if (std::find(written.begin(), written.end(), slot) != written.end()) continue;
        EXPECT_TRUE(
            std::equal(before.begin() + slot * size, before.begin() + (slot + 1) * size, m.pool.begin() + slot * size))
            << "slot " << slot;
    }
}

class ApiHostile : public testing::TestWithParam<std::string> {
protected:
    static PlanOptions options() {
        PlanOptions o;
        o.backend = GetParam();
        return o;
    }
};

TEST_P(ApiHostile, Forward) {
    Problem p = packed_problem();
    p.checkpoints = Checkpoints::listed;
    ForwardSetup s(p, options());
    const ForwardArgs good = s.args;
    Hostile random(11);
    Counts counts;
    for (int i = 0; i < 3000; ++i) {
        const auto offsets = random.offsets(3, 16), read = random.slots(3, 8), write = random.slots(3, 8),
                   has = random.numbers(3, 0, 1);
        auto checkpoints = random.numbers(8, -1, 2);  // (sequence, token)
        const std::vector<std::int32_t> flags(has.begin(), has.end());
        s.args = good;
        s.args.cu_seqlens = list(offsets);
        if (random.often()) s.args.initial_state = s.args.final_state = s.m.whole_pool();
        if (s.args.final_state.shape[0] == 8) s.args.state_indices = list(read);
        if (s.args.final_state.shape[0] == 8 && random.often()) s.args.state_indices_out = list(write);
        if (random.often()) s.args.has_initial_state = tensor(flags.data(), DType::i32, {3});
        s.args.checkpoint_list = rows(checkpoints, 2);
        s.args.checkpoints = tensor(s.m.steps.data(), DType::f32, {4, s.m.Hv, s.m.K, s.m.V});
        const std::vector<float> before = s.m.pool;
        const Status status = s.run();
        counts.add(status);
        expect_untouched(s.m, before,
                         !status.ok() || !s.args.state_indices.given() ? std::vector<std::int64_t>{}
                         : s.args.state_indices_out.given()            ? write
                                                                       : read);
    }
    counts.expect_both();
}

TEST_P(ApiHostile, Decode) {
    for (const bool packed : {false, true}) {
        DecodeSetup s(packed ? packed_problem() : fixed_problem(2), options());
        const DecodeArgs good = s.args;
        const std::int64_t N = s.m.N;
        Hostile random(packed ? 5 : 6);
        Counts counts;
        for (int i = 0; i < 3000; ++i) {
            const int columns = random.pick(1, 3);
            const auto offsets = random.offsets(3, 12), single = random.slots(N, 8), out = random.slots(N, 8),
                       table = random.slots(std::min<std::int64_t>(N * columns, 8) / N * N, 8),
                       accepted = random.numbers(N, -1, columns + 1), m = random.slots(N, N),
                       parents = random.numbers(N * 12, -1, 0);
            s.args = good;
            if (packed) s.args.cu_seqlens = list(offsets);
            s.args.commit_state = random.often();
            const bool wide = random.often();
            if (wide) {
                s.args.state_indices = rows(table, static_cast<std::int64_t>(table.size()) / N);
                if (random.often()) s.args.num_accepted = list(accepted);
            } else if (random.often()) {
                s.args.state_indices = list(single);
            }
            if (!wide && s.args.commit_state && random.rarely()) s.args.state_indices_out = list(out);
            if (random.often()) {
                s.args.intermediate_states = s.m.all_steps(12);
                if (random.often()) s.args.intermediate_indices = list(m);
                if (!s.args.commit_state) s.args.parent_tokens = rows(parents, 12);
            }
            const std::vector<float> before = s.m.pool;
            const Status status = s.run();
            counts.add(status);
            std::vector<std::int64_t> written;
            if (status.ok() && s.args.commit_state) {
                if (wide) written = table;
                if (!wide && s.args.state_indices.given()) written = single;
                if (s.args.state_indices_out.given()) written = out;
                if (!wide && !s.args.state_indices.given() && !s.args.state_indices_out.given()) written = {0, 1, 2};
            }
            expect_untouched(s.m, before, written);
        }
        counts.expect_both();
    }
}

INSTANTIATE_TEST_SUITE_P(Of, ApiHostile, testing::ValuesIn(backend_list()),
                         [](const auto& name) { return name.param; });

}  // namespace
}  // namespace flashqla::test
