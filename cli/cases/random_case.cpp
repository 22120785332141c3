#include "cases/random_case.hpp"

#include <algorithm>
#include <numeric>

#include "cases/numbers.hpp"

namespace flashqla::cases {
namespace {

class Dice {
public:
    explicit Dice(std::uint64_t seed) : draw_(seed, 77) {}
    std::int64_t from(std::int64_t low, std::int64_t high) {
        return low + static_cast<std::int64_t>(draw_.bits(next_++) % static_cast<std::uint64_t>(high - low + 1));
    }
    bool one_in(std::int64_t n) { return from(1, n) == 1; }
    template <class T>
    T pick(std::initializer_list<T> list) {
        return list.begin()[from(0, static_cast<std::int64_t>(list.size()) - 1)];
    }

private:
    Draw draw_;
    std::int64_t next_ = 0;
};

// Distinct slots in random order, some of them padding.
std::vector<std::int64_t> slots(Dice& dice, std::int64_t count, std::int64_t pool, PadRule pad) {
    const std::int64_t first = pad == PadRule::non_positive ? 1 : 0;
    std::vector<std::int64_t> all(static_cast<std::size_t>(pool - first));
    std::iota(all.begin(), all.end(), first);
    for (std::size_t i = all.size(); i > 1; --i) {
        std::swap(all[i - 1], all[static_cast<std::size_t>(dice.from(0, static_cast<std::int64_t>(i) - 1))]);
    }
    all.resize(static_cast<std::size_t>(count));
    for (std::int64_t& slot : all) {
        if (dice.one_in(6)) slot = -dice.from(first == 1 ? 0 : 1, 3);
    }
    return all;
}

void sizes(Case& c, Dice& dice) {
    c.heads_k = static_cast<std::int32_t>(dice.from(1, 3));
    c.heads_v = c.heads_k * static_cast<std::int32_t>(dice.from(1, 3));
    const auto head_size = [&](std::int64_t most) {
        if (dice.one_in(2)) return static_cast<std::int32_t>(dice.pick<std::int64_t>({16, 32, 64, 128}));
        return static_cast<std::int32_t>(dice.from(1, dice.one_in(8) ? most : 70));
    };
    c.dim_k = head_size(256);
    c.dim_v = dice.one_in(2) ? c.dim_k : head_size(512);
    const bool decode = c.pass == Pass::decode;
    const std::int64_t longest = decode ? 16 : dice.one_in(3) ? 300 : 90;
    if (dice.one_in(2)) {
        c.batch = dice.from(1, decode ? 9 : 3);
        c.tokens = decode && dice.one_in(2) ? 1 : dice.from(1, longest);
        return;
    }
    c.tokens = 0;
    for (std::int64_t n = dice.from(1, 6); n > 0; --n) {
        c.lens.push_back(dice.one_in(5) ? 0 : dice.one_in(3) ? dice.from(1, 4) : dice.from(1, longest));
        c.tokens += c.lens.back();
    }
    if (c.tokens == 0) c.lens[0] = c.tokens = 1;
    if (dice.one_in(3)) c.tokens += dice.from(1, 70);
}

void rule(Case& c, Dice& dice) {
    c.io = dice.pick({DType::f32, DType::f32, DType::bf16, DType::f16});
    if (dice.one_in(6)) c.out = DType::f32;
    c.state = dice.pick({DType::f32, DType::f32, DType::bf16, DType::f16});
    c.g_type = dice.pick({DType::f32, DType::f32, DType::f32, DType::bf16, DType::f16});
    c.beta_type = dice.pick({DType::f32, DType::f32, DType::f32, DType::bf16, DType::f16});
    c.index = dice.pick({DType::i32, DType::i64});
    c.gate = dice.pick({Gate::log, Gate::log, Gate::raw, Gate::none});
    using Kind = GateDraw::Kind;
    c.g.kind = dice.pick({Kind::typical, Kind::typical, Kind::weak, Kind::strong, Kind::zero, Kind::mixed, Kind::half0,
                          Kind::published, Kind::cliff});
    c.beta_mode = dice.pick({BetaMode::value, BetaMode::logit});
    c.beta_given = !dice.one_in(8);
    if (!c.beta_given) c.beta_mode = BetaMode::value;
    // Without decay and with beta up to 2 nothing is forgotten, rounding errors included; with 16-bit inputs the tables
    // have such cases, with their own tolerance.
    const bool forgets = c.gate != Gate::none && (c.g.kind == Kind::typical || c.g.kind == Kind::strong);
    c.negative = c.beta_given && dice.one_in(5) && (forgets || c.io == DType::f32);
    if (!forgets && c.io != DType::f32) c.beta_given = true;
    c.l2norm = dice.one_in(3);
    // Normalisation takes the whole gradient away where K is 1, and most of it where K is hardly more.
    if (c.l2norm && c.pass == Pass::backward) c.dim_k = std::max(c.dim_k, 4);
    c.keys = c.l2norm ? dice.pick({Keys::raw, Keys::normal, Keys::unit}) : Keys::unit;
    if (dice.one_in(6)) c.scale = dice.pick({1.0, -0.5, 0.125});
    c.layout = dice.pick({StateLayout::kv, StateLayout::vk});
    c.grouping = dice.pick({Grouping::interleaved, Grouping::interleaved, Grouping::tiled});
    c.pad = dice.pick({PadRule::negative, PadRule::non_positive});
    c.strided = dice.one_in(2);
}

void forward_states(Case& c, Dice& dice) {
    const std::int64_t count = c.sequences();
    if (dice.one_in(3)) {
        c.pool = count + dice.from(1, 5);
        c.slots = slots(dice, count, c.pool, c.pad);
        c.initial = !dice.one_in(5);
    } else {
        c.initial = dice.one_in(2);
        c.final = !dice.one_in(4);
        c.in_place = c.initial && c.final && dice.one_in(4);
    }
    if (c.initial && dice.one_in(4)) {
        for (std::int64_t n = 0; n < count; ++n) c.has_initial.push_back(dice.from(0, 1));
    }
    if (dice.one_in(3)) {
        c.checkpoints = dice.pick({Checkpoints::chunk_starts, Checkpoints::every_n, Checkpoints::listed});
        if (c.checkpoints == Checkpoints::every_n) c.checkpoint_every = dice.from(1, 80);
        for (int i = 0; c.checkpoints == Checkpoints::listed && i < 5; ++i) {
            const std::int64_t n = dice.from(0, count - 1);
            c.checkpoint_list.emplace_back(dice.one_in(6) ? -1 : n, dice.from(0, c.length(n)));
        }
    }
}

void decode_states(Case& c, Dice& dice) {
    const std::int64_t count = c.sequences();
    c.initial = true;
    c.verify = dice.pick({Verify::none, Verify::none, Verify::slots, Verify::buffer, Verify::tree});
    if (c.verify == Verify::slots) {
        c.columns = c.tokens_per_row() + dice.from(0, 2);
        c.pool = count * c.columns + 3;
        c.slots = slots(dice, count * c.columns, c.pool, c.pad);
    } else if (c.verify != Verify::none || dice.one_in(2)) {
        c.pool = count + dice.from(1, 5);
        c.slots = slots(dice, count, c.pool, c.pad);
    }
    if (c.verify != Verify::none && dice.one_in(2)) {
        // NOTE: commit() does not know the lengths of packed rows, so accepting more than the row has is the caller's
        // mistake there; beyond the buffer it has to be ignored.
        const bool lengths_unknown = c.packed() && c.verify != Verify::slots;
        for (std::int64_t n = 0; n < count; ++n) {
            c.accepted.push_back(dice.from(-1, lengths_unknown ? c.length(n) : c.tokens_per_row() + 2));
        }
    }
    if (c.verify == Verify::none && dice.one_in(4)) {
        for (std::int64_t n = 0; n < count; ++n) c.has_initial.push_back(dice.from(0, 1));
    }
    if (dice.one_in(6)) c.commit = false;
}

}  // namespace

Case random_case(std::uint64_t seed) {
    Dice dice(seed);
    Case c;
    c.seed = seed;
    c.pass = dice.pick({Pass::forward, Pass::forward, Pass::backward, Pass::decode});
    sizes(c, dice);
    rule(c, dice);
    switch (c.pass) {
        case Pass::forward: forward_states(c, dice); break;
        case Pass::decode: decode_states(c, dice); break;
        case Pass::backward:
            c.initial = dice.one_in(2);
            c.drop_d_o = dice.one_in(8);
            c.drop_d_final = dice.one_in(3);
            if (c.io != DType::f32 && dice.one_in(3)) c.grad = DType::f32;
            if (dice.one_in(4)) c.skip.push_back(dice.pick({"d_q", "d_k", "d_v", "d_g", "d_beta"}));
            break;
    }
    if (dice.one_in(3)) c.threads = static_cast<std::int32_t>(dice.from(1, 3));
    if (c.pass != Pass::decode && dice.one_in(5)) c.split = static_cast<std::int32_t>(dice.from(1, 4));
    c.deterministic = dice.one_in(6);
    c.batch_invariant = dice.one_in(6);
    return c;
}

}  // namespace flashqla::cases
