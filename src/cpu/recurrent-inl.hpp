// The token recurrence of one value head: decode, verification, and sequences too short for chunks. Compiled per
// target.
//
// Both reads of a token use the state before it:  with a = exp(g), u = S^T k, r = S^T q (norms and scale folded in),
//   d = beta (v - a u),   o = a r + (k . q) d,   S <- a S + k d^T
// so one pass over the state reads it twice and a second pass, which hits the cache, updates it.

// NOTE: the guard toggles, see simd-inl.hpp.
#if defined(FQLA_CPU_RECURRENT_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FQLA_CPU_RECURRENT_INL_HPP_
#undef FQLA_CPU_RECURRENT_INL_HPP_
#else
#define FQLA_CPU_RECURRENT_INL_HPP_
#endif

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/workspace.hpp"
#include "cpu/chunk-inl.hpp"
#include "cpu/gates-inl.hpp"
#include "cpu/kernels.hpp"
#include "cpu/simd-inl.hpp"
#include "cpu/states-inl.hpp"

FQLA_BEGIN_TARGET
namespace flashqla::cpu {
namespace HWY_NAMESPACE {

// Vector access to a state of one storage type.
struct FloatStore {
    using Type = float;
    static HWY_INLINE FloatVec load(const float* p) { return hn::LoadU(FloatTag(), p); }
    static HWY_INLINE void store(FloatVec x, float* p) { hn::StoreU(x, FloatTag(), p); }
    static HWY_INLINE float load_one(const float* p) { return *p; }
    static HWY_INLINE void store_one(float x, float* p) { *p = x; }
};

// NOTE: a vector of words holds the even elements in its low and the odd ones in its high halves; two instructions make
// floats of them, where widening element by element takes four.
struct Bf16Store {
    using Type = std::uint16_t;
    static HWY_INLINE hn::Vec<WordTag> load_words(const std::uint16_t* p) {
        return hn::LoadU(WordTag(), reinterpret_cast<const std::uint32_t*>(p));
    }
    static HWY_INLINE FloatVec even(hn::Vec<WordTag> w) { return hn::BitCast(FloatTag(), hn::ShiftLeft<16>(w)); }
    static HWY_INLINE FloatVec odd(hn::Vec<WordTag> w) {
        return hn::BitCast(FloatTag(), hn::And(w, hn::Set(WordTag(), 0xffff0000u)));
    }
    static HWY_INLINE void store_words(FloatVec e, FloatVec o, std::uint16_t* p) {
#if FQLA_HAVE_BF16_DOT
        const auto words = bf16_pair(e, o);
#else
        const auto words = hn::Or(bf16_bits(e), hn::ShiftLeft<16>(bf16_bits(o)));
#endif
        hn::StoreU(words, WordTag(), reinterpret_cast<std::uint32_t*>(p));
    }
    static HWY_INLINE FloatVec load(const std::uint16_t* p) {
        const hn::Rebind<std::uint16_t, FloatTag> d16;
        return hn::BitCast(FloatTag(), hn::ShiftLeft<16>(hn::PromoteTo(WordTag(), hn::LoadU(d16, p))));
    }
    static HWY_INLINE void store(FloatVec x, std::uint16_t* p) {
        const hn::Rebind<std::uint16_t, FloatTag> d16;
        const hn::RebindToSigned<FloatTag> di;
        hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, bf16_bits(x))), d16, p);
    }
    static HWY_INLINE float load_one(const std::uint16_t* p) { return bf16_to_float(*p); }
    static HWY_INLINE void store_one(float x, std::uint16_t* p) { *p = float_to_bf16(x); }
};

// One token of one value head, operands ready. k and q hold padded_k floats, zeros past dim_k.
struct Token {
    const float *k, *q;  // with norms and scale folded in
    const float* v;
    float* o;
    float* delta;                      // [V + lanes]
    float *read_k, *read_q;            // [V] scratch: S^T k and S^T q
    const float *k_halves, *q_halves;  // [K] for bf16 rows of K: even elements of 2 lanes, then the odd ones, and so on
    float decay, beta, kq;
};

// Memory that the next step will read, asked for while this one computes: one pass over a state from memory takes as
// long as both passes of arithmetic.
struct Ahead {
    const std::byte* next = nullptr;
    std::size_t bytes = 0;  // a step
    HWY_INLINE void step() {
        for (std::size_t i = 0; i < bytes; i += 64) __builtin_prefetch(next + i, 0, 2);
        next += bytes;
    }
};

// Keeps a value in a register. NOTE: GCC otherwise folds the load into both of its uses and reads memory twice, which
// costs a third of a decode step.
HWY_INLINE void keep(FloatVec& x) {
#if (HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL) && HWY_COMPILER_GCC_ACTUAL
    asm("" : "+v"(x.raw));
#elif HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR && HWY_COMPILER_GCC_ACTUAL
    asm("" : "+x"(x.raw));
#endif
    (void)x;
}

// delta and output of a vector of columns from u = S^T k and r = S^T q.
HWY_INLINE void finish_columns(const Token& token, std::size_t v, FloatVec u, FloatVec r) {
    const FloatTag d;
    const auto decay = hn::Set(d, token.decay);
    const auto delta = hn::Mul(hn::Set(d, token.beta), hn::NegMulAdd(decay, u, hn::LoadU(d, token.v + v)));
    hn::StoreU(delta, d, token.delta + v);
    hn::StoreU(hn::MulAdd(hn::Set(d, token.kq), delta, hn::Mul(decay, r)), d, token.o + v);
}

// kv layout, kTileRows vectors of columns at once; `from` and `to` point to the first of them.
template <class Store>
HWY_INLINE void step_columns(const Token& token, std::size_t v, std::size_t dim_k, const typename Store::Type* from,
                             std::int64_t from_row, typename Store::Type* to, std::int64_t to_row, Ahead& ahead) {
    const FloatTag d;
    const auto decay = hn::Set(d, token.decay);
#define FQLA_ROW(i) auto x##i = hn::Zero(d), y##i = hn::Zero(d);
    FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
    const typename Store::Type* s = from;
    for (std::size_t k = 0; k < dim_k; ++k, s += from_row) {
        ahead.step();
        const auto kk = hn::Set(d, token.k[k]), qq = hn::Set(d, token.q[k]);
#define FQLA_ROW(i)                                \
    {                                              \
        auto state = Store::load(s + i * lanes()); \
        keep(state);                               \
        x##i = hn::MulAdd(state, kk, x##i);        \
        y##i = hn::MulAdd(state, qq, y##i);        \
    }
        FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
    }
#define FQLA_ROW(i) finish_columns(token, v + i * lanes(), x##i, y##i);
    FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
#define FQLA_ROW(i) x##i = hn::LoadU(d, token.delta + v + i * lanes());
    FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
    // From the last row up: it and those before it are still in the first-level cache, which a whole state overflows.
    to += std::int64_t(dim_k) * to_row;
    for (std::size_t k = dim_k; k-- > 0;) {
        ahead.step();
        s -= from_row, to -= to_row;
        const auto kk = hn::Set(d, token.k[k]);
#define FQLA_ROW(i) Store::store(hn::MulAdd(kk, x##i, hn::Mul(decay, Store::load(s + i * lanes()))), to + i * lanes());
        FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
    }
}

// The same on bf16 states, even and odd columns apart.
template <>
HWY_INLINE void step_columns<Bf16Store>(const Token& token, std::size_t v, std::size_t dim_k, const std::uint16_t* from,
                                        std::int64_t from_row, std::uint16_t* to, std::int64_t to_row, Ahead& ahead) {
    const FloatTag d;
    const std::size_t l = lanes();
    const auto decay = hn::Set(d, token.decay);
#define FQLA_ROW(i) auto x##i = hn::Zero(d), y##i = hn::Zero(d);
    FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
    const std::uint16_t* s = from;
    for (std::size_t k = 0; k < dim_k; ++k, s += from_row) {
        ahead.step();
        const auto kk = hn::Set(d, token.k[k]), qq = hn::Set(d, token.q[k]);
#define FQLA_ROW(i, j)                                                         \
    {                                                                          \
        const auto words = Bf16Store::load_words(s + i * l);                   \
        const auto even = Bf16Store::even(words), odd = Bf16Store::odd(words); \
        x##i = hn::MulAdd(even, kk, x##i);                                     \
        y##i = hn::MulAdd(even, qq, y##i);                                     \
        x##j = hn::MulAdd(odd, kk, x##j);                                      \
        y##j = hn::MulAdd(odd, qq, y##j);                                      \
    }
        FQLA_EACH_COUPLE(FQLA_ROW)
#undef FQLA_ROW
    }
#define FQLA_ROW(i, j)                                          \
    hn::StoreInterleaved2(x##i, x##j, d, token.read_k + i * l); \
    hn::StoreInterleaved2(y##i, y##j, d, token.read_q + i * l);
    FQLA_EACH_COUPLE(FQLA_ROW)
#undef FQLA_ROW
#define FQLA_ROW(i) \
    finish_columns(token, v + i * l, hn::LoadU(d, token.read_k + i * l), hn::LoadU(d, token.read_q + i * l));
    FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
#define FQLA_ROW(i, j) hn::LoadInterleaved2(d, token.delta + v + i * l, x##i, x##j);
    FQLA_EACH_COUPLE(FQLA_ROW)
#undef FQLA_ROW
    s = from;
    for (std::size_t k = 0; k < dim_k; ++k, s += from_row, to += to_row) {
        ahead.step();
        const auto kk = hn::Set(d, token.k[k]);
#define FQLA_ROW(i, j)                                                                                   \
    {                                                                                                    \
        const auto words = Bf16Store::load_words(s + i * l);                                             \
        Bf16Store::store_words(hn::MulAdd(kk, x##i, hn::Mul(decay, Bf16Store::even(words))),             \
                               hn::MulAdd(kk, x##j, hn::Mul(decay, Bf16Store::odd(words))), to + i * l); \
    }
        FQLA_EACH_COUPLE(FQLA_ROW)
#undef FQLA_ROW
    }
}

// kv layout: rows of V values. Reads `from`, writes `to` (may be the same memory); row strides in elements.
template <class Store>
HWY_NOINLINE void step_kv(const Token& token, std::size_t dim_k, std::size_t dim_v, const typename Store::Type* from,
                          std::int64_t from_row, typename Store::Type* to, std::int64_t to_row, Ahead ahead) {
    const FloatTag d;
    const std::size_t l = lanes();
    const auto decay = hn::Set(d, token.decay);
    std::size_t v = 0;
    for (; v + kTileRows * l <= dim_v; v += kTileRows * l)
        step_columns<Store>(token, v, dim_k, from + v, from_row, to + v, to_row, ahead);
    for (; v + l <= dim_v; v += l) {
        auto u = hn::Zero(d), r = hn::Zero(d);
        for (std::size_t k = 0; k < dim_k; ++k) {
            const auto state = Store::load(from + std::int64_t(k) * from_row + std::int64_t(v));
            u = hn::MulAdd(state, hn::Set(d, token.k[k]), u);
            r = hn::MulAdd(state, hn::Set(d, token.q[k]), r);
        }
        finish_columns(token, v, u, r);
        const auto delta = hn::LoadU(d, token.delta + v);
        for (std::size_t k = 0; k < dim_k; ++k) {
            const auto state = Store::load(from + std::int64_t(k) * from_row + std::int64_t(v));
            Store::store(hn::MulAdd(hn::Set(d, token.k[k]), delta, hn::Mul(decay, state)),
                         to + std::int64_t(k) * to_row + std::int64_t(v));
        }
    }
    for (; v < dim_v; ++v) {
        float u = 0.0f, r = 0.0f;
        for (std::size_t k = 0; k < dim_k; ++k) {
            const float state = Store::load_one(from + std::int64_t(k) * from_row + std::int64_t(v));
            u += state * token.k[k];
            r += state * token.q[k];
        }
        const float delta = token.beta * (token.v[v] - token.decay * u);
        token.o[v] = token.decay * r + token.kq * delta;
        for (std::size_t k = 0; k < dim_k; ++k) {
            const float state = Store::load_one(from + std::int64_t(k) * from_row + std::int64_t(v));
            Store::store_one(token.decay * state + token.k[k] * delta, to + std::int64_t(k) * to_row + std::int64_t(v));
        }
    }
}

// vk layout: u += row k and r += row q for elements k0 on, a step of them.
HWY_INLINE void read_row(const Token& token, std::size_t k0, const float* row, FloatVec& u, FloatVec& r) {
    const FloatTag d;
    auto state = hn::LoadU(d, row + k0);
    keep(state);
    u = hn::MulAdd(state, hn::LoadU(d, token.k + k0), u);
    r = hn::MulAdd(state, hn::LoadU(d, token.q + k0), r);
}
HWY_INLINE void read_row(const Token& token, std::size_t k0, const std::uint16_t* row, FloatVec& u, FloatVec& r) {
    const FloatTag d;
    const auto words = Bf16Store::load_words(row + k0);
    const auto even = Bf16Store::even(words), odd = Bf16Store::odd(words);
    u = hn::MulAdd(even, hn::LoadU(d, token.k_halves + k0), u);
    r = hn::MulAdd(even, hn::LoadU(d, token.q_halves + k0), r);
    u = hn::MulAdd(odd, hn::LoadU(d, token.k_halves + k0 + lanes()), u);
    r = hn::MulAdd(odd, hn::LoadU(d, token.q_halves + k0 + lanes()), r);
}

// vk layout: the update of one row, over whole steps.
template <class Store>
HWY_INLINE void update_row(const Token& token, FloatVec decay, FloatVec delta, std::size_t whole,
                           const typename Store::Type* s, typename Store::Type* t) {
    for (std::size_t k = 0; k < whole; k += lanes())
        Store::store(hn::MulAdd(hn::LoadU(FloatTag(), token.k + k), delta, hn::Mul(decay, Store::load(s + k))), t + k);
}
template <>
HWY_INLINE void update_row<Bf16Store>(const Token& token, FloatVec decay, FloatVec delta, std::size_t whole,
                                      const std::uint16_t* s, std::uint16_t* t) {
    const FloatTag d;
    for (std::size_t k = 0; k < whole; k += 2 * lanes()) {
        const auto words = Bf16Store::load_words(s + k);
        const auto ke = hn::LoadU(d, token.k_halves + k), ko = hn::LoadU(d, token.k_halves + k + lanes());
        Bf16Store::store_words(hn::MulAdd(ke, delta, hn::Mul(decay, Bf16Store::even(words))),
                               hn::MulAdd(ko, delta, hn::Mul(decay, Bf16Store::odd(words))), t + k);
    }
}

// vk layout: rows of K values; every row is a problem of its own.
template <class Store>
HWY_NOINLINE void step_vk(const Token& token, std::size_t dim_k, std::size_t dim_v, const typename Store::Type* from,
                          std::int64_t from_row, typename Store::Type* to, std::int64_t to_row, Ahead ahead) {
    const FloatTag d;
    const std::size_t l = lanes(), step = sizeof(typename Store::Type) == 2 ? 2 * l : l, whole = dim_k / step * step;
    const auto decay = hn::Set(d, token.decay);
    const auto tail = [&](std::size_t v, float& u, float& r) {
        for (std::size_t k = whole; k < dim_k; ++k) {
            const float state = Store::load_one(from + std::int64_t(v) * from_row + std::int64_t(k));
            u += state * token.k[k];
            r += state * token.q[k];
        }
    };
    const auto finish = [&](std::size_t v, float u, float r) {
        tail(v, u, r);
        const float delta = token.beta * (token.v[v] - token.decay * u);
        token.delta[v] = delta;
        token.o[v] = token.decay * r + token.kq * delta;
    };
    const auto update = [&](std::size_t v) {
        const typename Store::Type* s = from + std::int64_t(v) * from_row;
        typename Store::Type* t = to + std::int64_t(v) * to_row;
        update_row<Store>(token, decay, hn::Set(d, token.delta[v]), whole, s, t);
        for (std::size_t k = whole; k < dim_k; ++k)
            Store::store_one(token.decay * Store::load_one(s + k) + token.k[k] * token.delta[v], t + k);
    };
    std::size_t v = 0;
    for (; v + kTileRows <= dim_v; v += kTileRows) {
#define FQLA_ROW(i) auto x##i = hn::Zero(d), y##i = hn::Zero(d);
        FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
        const typename Store::Type* s = from + std::int64_t(v) * from_row;
        for (std::size_t k = 0; k < whole; k += step) {
#define FQLA_ROW(i) read_row(token, k, s + i * from_row, x##i, y##i);
            FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
        }
#define FQLA_ROW(i) finish(v + i, hn::GetLane(hn::SumOfLanes(d, x##i)), hn::GetLane(hn::SumOfLanes(d, y##i)));
        FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
        for (std::size_t i = 0; i < kTileRows; ++i) {
            ahead.step();
            update(v + i);
        }
    }
    for (; v < dim_v; ++v) {
        auto u = hn::Zero(d), r = hn::Zero(d);
        for (std::size_t k = 0; k < whole; k += step) read_row(token, k, from + std::int64_t(v) * from_row, u, r);
        finish(v, hn::GetLane(hn::SumOfLanes(d, u)), hn::GetLane(hn::SumOfLanes(d, r)));
        update(v);
    }
}

struct RecurrentScratch {
    float *k, *q, *v, *o, *delta, *read_k, *read_q;
    float *k_halves, *q_halves;  // [padded_k] see Token
    float* turn;                 // [strip, padded_k]
    float* state;                // [padded_k, ld]
    std::size_t ld;

    template <class Booker>
    void book(Booker& b, const Shape& s) {
        const std::size_t pk = padded_rows<FloatDot>(static_cast<std::size_t>(s.dim_k)) + 2 * lanes();
        const std::size_t strip = strip_columns();
        ld = (static_cast<std::size_t>(s.dim_v) + strip - 1) / strip * strip;
        for (float** p : {&k, &q, &k_halves, &q_halves}) b.take(*p, pk);
        for (float** p : {&v, &o, &delta, &read_k, &read_q}) b.take(*p, ld);
        b.take(turn, strip * pk);
        b.take(state, pk * ld);
    }
};

struct Recurrence {
    const RecurrentTask& task;
    const Inputs& in;
    RecurrentScratch& s;
    std::size_t dim_k, dim_v;
    Token token;

    HWY_INLINE void load_token(std::int64_t t) {
        const std::int32_t head = task.value_head, key = in.key_head(head);
        const std::int64_t at = task.span.begin + t, b = task.span.batch;
        load_row(in.k.data, in.k.dtype, in.k.offset(b, at, key), dim_k, s.k);
        load_row(in.q.data, in.q.dtype, in.q.offset(b, at, key), dim_k, s.q);
        load_row(in.v.data, in.v.dtype, in.v.offset(b, at, head), dim_v, s.v);
        const std::size_t pk = padded_rows<FloatDot>(dim_k);
        for (std::size_t i = dim_k; i < pk + 2 * lanes(); ++i) s.k[i] = s.q[i] = 0.0f;
        const float nk = inverse_norm(in, s.k, dim_k), nq = in.problem.scale * inverse_norm(in, s.q, dim_k);
        const FloatTag d;
        auto dot = hn::Zero(d);
        for (std::size_t i = 0; i < pk; i += lanes()) {
            const auto k = hn::Mul(hn::LoadU(d, s.k + i), hn::Set(d, nk));
            const auto q = hn::Mul(hn::LoadU(d, s.q + i), hn::Set(d, nq));
            dot = hn::MulAdd(k, q, dot);
            hn::StoreU(k, d, s.k + i);
            hn::StoreU(q, d, s.q + i);
        }
        token = {s.k,
                 s.q,
                 s.v,
                 s.o,
                 s.delta,
                 s.read_k,
                 s.read_q,
                 s.k_halves,
                 s.q_halves,
                 static_cast<float>(std::exp(log_decay(in, task.span, t, head))),
                 beta_of(in, task.span, t, head),
                 hn::GetLane(hn::SumOfLanes(d, dot))};
    }

    // k and q with even and odd elements apart, for rows of K in bf16.
    HWY_INLINE void split_halves() {
        const FloatTag d;
        for (std::size_t i = 0; i < dim_k; i += 2 * lanes())
            for (const auto& [from, to] : {std::pair{s.k, s.k_halves}, std::pair{s.q, s.q_halves}}) {
                FloatVec even, odd;
                hn::LoadInterleaved2(d, from + i, even, odd);
                hn::StoreU(even, d, to + i);
                hn::StoreU(odd, d, to + i + lanes());
            }
    }

    HWY_INLINE void store_output(std::int64_t t) {
        store_row(s.o, dim_v, task.o.data, task.o.dtype,
                  task.o.offset(task.span.batch, task.span.begin + t, task.value_head));
    }

    // The state stays where it is: read from the slot, written to the slot, in the slot's own type.
    template <class Store>
    HWY_INLINE void step_in_place() {
        using Type = typename Store::Type;
        const StateRef &from = task.state_in, &to = task.state_out;
        const auto* f = static_cast<const Type*>(from.data) + from.offset(task.slots.read, task.value_head);
        auto* t = static_cast<Type*>(to.data) + to.offset(task.slots.write, task.value_head);
        // One state in as many steps as the layout's loops take.
        const std::size_t bytes = dim_k * dim_v * sizeof(Type);
        const std::size_t steps =
            from.v == 1 ? 2 * dim_k * std::max<std::size_t>(1, dim_v / (kTileRows * lanes())) : dim_v;
        Ahead ahead{static_cast<const std::byte*>(task.next_state), task.next_state ? bytes / steps : 0};
        if (from.v == 1) return step_kv<Store>(token, dim_k, dim_v, f, from.k, t, to.k, ahead);
        if (sizeof(Type) == 2) split_halves();
        step_vk<Store>(token, dim_k, dim_v, f, from.v, t, to.v, ahead);
    }

    HWY_INLINE bool can_step_in_place() const {
        const StateRef &from = task.state_in, &to = task.state_out;
        const bool plain =
            task.decode == nullptr || (!task.decode->slot_per_token() && intermediate_row(*task.decode, task.row) < 0);
        return plain && task.forward == nullptr && task.span.length == 1 && task.slots.read >= 0 &&
               task.slots.write >= 0 && from.dtype == to.dtype && from.dtype != DType::f16;
    }

    HWY_INLINE void load_state(const StateRef& from, std::int64_t row) {
        each_strip([&](std::size_t v0, std::size_t columns, const Tile& tile) {
            load_tile(from, row, task.value_head, v0, columns, tile, s.turn);
        });
    }

    HWY_INLINE void store_state(const StateRef& to, std::int64_t row) {
        each_strip([&](std::size_t v0, std::size_t columns, const Tile& tile) {
            store_tile(tile, v0, columns, to, row, task.value_head, s.turn);
        });
    }

    // Row m, token t of the intermediate buffer as a one-row state tensor.
    HWY_INLINE StateRef step_of(const StateRef& buffer, std::int64_t t) const {
        StateRef ref = buffer;
        ref.data = static_cast<std::byte*>(buffer.data) + t * buffer.step * std::int64_t(size_of(buffer.dtype));
        return ref;
    }

    HWY_INLINE void run_tokens() {
        const DecodeCall* decode = task.decode;
        if (task.slots.read >= 0)
            load_state(task.state_in, task.slots.read);
        else
            fill(s.state, padded_rows<FloatDot>(dim_k) * s.ld, 0.0f);
        const std::int64_t kept = decode ? intermediate_row(*decode, task.row) : -1;
        const bool tree = decode && decode->parent_tokens;
        for (std::int64_t t = 0; t < task.span.length; ++t) {
            visit_checkpoints(t);
            if (tree) start_from_parent(t, kept);
            load_token(t);
            step_kv<FloatStore>(token, dim_k, dim_v, s.state, std::int64_t(s.ld), s.state, std::int64_t(s.ld), {});
            store_output(t);
            if (kept >= 0) store_state(step_of(decode->intermediate_states, t), kept);
            if (decode) {
                const std::int64_t slot = token_slot(*decode, task.row, t);
                if (slot >= 0) store_state(task.state_out, slot);
            }
        }
        visit_checkpoints(task.span.length);
        if (task.slots.write >= 0) store_state(task.state_out, task.slots.write);
    }

private:
    template <class F>
    HWY_INLINE void each_strip(F&& f) {
        const std::size_t strip = strip_columns();
        for (std::size_t v0 = 0; v0 < dim_v; v0 += strip)
            f(v0, std::min(strip, dim_v - v0), Tile{s.state + v0, s.ld, dim_k, padded_rows<FloatDot>(dim_k)});
    }

    HWY_INLINE void start_from_parent(std::int64_t t, std::int64_t kept) {
        const std::int64_t parent = task.decode->parent_tokens.at(task.row, t);
        if (parent == t - 1 && t > 0) return;  // already there
        if (parent >= 0)
            load_state(step_of(task.decode->intermediate_states, parent), kept);
        else if (task.slots.read >= 0)
            load_state(task.state_in, task.slots.read);
        else
            fill(s.state, padded_rows<FloatDot>(dim_k) * s.ld, 0.0f);
    }

    HWY_INLINE void visit_checkpoints(std::int64_t t) {
        if (!task.forward) return;
        const CheckpointCursor cursor(*task.forward, task.row, 0, task.checkpoint_row, true);
        cursor.visit(t, [&](std::int64_t row) { store_state(task.forward->checkpoints, row); });
    }
};

void recurrent_task(const RecurrentTask& task, std::byte* scratch) {
    const Problem& p = task.inputs->problem;
    Shape shape;
    shape.dim_k = p.dim_k, shape.dim_v = p.dim_v;
    RecurrentScratch s;
    Taker taker{scratch};
    s.book(taker, shape);
    Recurrence r{task, *task.inputs, s, static_cast<std::size_t>(p.dim_k), static_cast<std::size_t>(p.dim_v), {}};
    if (!r.can_step_in_place()) return r.run_tokens();
    r.load_token(0);
    if (task.state_in.dtype == DType::f32)
        r.step_in_place<FloatStore>();
    else
        r.step_in_place<Bf16Store>();
    r.store_output(0);
}

std::size_t recurrent_scratch(const Shape& shape) {
    RecurrentScratch s;
    Taker taker{nullptr};
    s.book(taker, shape);
    return taker.bytes();
}

// out[k,:] = base[k,:] + sum_j A(k,j) in[j,:] for [K,V] matrices; A(k,j) at a + k * row_step + j * depth_step.
HWY_INLINE void add_product(const Shape& shape, const float* a, std::size_t row_step, std::size_t depth_step,
                            const float* in, const float* base, float* out) {
    using Dot = FloatDot;
    const FloatTag d;
    const auto dim_k = static_cast<std::size_t>(shape.dim_k), dim_v = static_cast<std::size_t>(shape.dim_v);
    const std::size_t l = lanes(), kRowStep = row_step;
    const std::size_t rows = dim_k / kTileRows * kTileRows, columns = dim_v / (2 * l) * (2 * l);
    for (std::size_t k = 0; k < rows; k += kTileRows)
        for (std::size_t v = 0; v < columns; v += 2 * l) {
            const float* from = base + k * dim_v + v;
#define FQLA_ROW(i) auto x##i = hn::LoadU(d, from + i * dim_v), y##i = hn::LoadU(d, from + i * dim_v + l);
            FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
            for (std::size_t j = 0; j < dim_k; ++j)
                FQLA_TILE_STEP(a + k * row_step + j * depth_step, in + j * dim_v + v, l)
            float* to = out + k * dim_v + v;
#define FQLA_ROW(i)                      \
    hn::StoreU(x##i, d, to + i * dim_v); \
    hn::StoreU(y##i, d, to + i * dim_v + l);
            FQLA_EACH_ROW(FQLA_ROW)
#undef FQLA_ROW
        }
    for (std::size_t k = 0; k < dim_k; ++k)
        for (std::size_t v = k < rows ? columns : 0; v < dim_v; ++v) {
            float sum = base[k * dim_v + v];
            for (std::size_t j = 0; j < dim_k; ++j) sum += a[k * row_step + j * depth_step] * in[j * dim_v + v];
            out[k * dim_v + v] = sum;
        }
}

void join_carry(const Shape& shape, const float* star, const float* transition, const float* carry_in,
                float* carry_out) {
    add_product(shape, transition, static_cast<std::size_t>(shape.dim_k), 1, carry_in, star, carry_out);
}

void join_adjoint(const Shape& shape, const float* transition, const float* later, float* adjoint) {
    add_product(shape, transition, 1, static_cast<std::size_t>(shape.dim_k), later, adjoint, adjoint);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashqla::cpu
FQLA_END_TARGET

#endif  // toggled guard
