#include "cases/items.hpp"

#include <algorithm>
#include <charconv>
#include <limits>

namespace flashqla::cases {

bool read_number(std::string_view text, std::int64_t& x) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), x);
    return error == std::errc() && end == text.data() + text.size();
}

std::vector<std::string_view> split(std::string_view text, char separator) {
    std::vector<std::string_view> parts;
    for (std::size_t begin = 0;;) {
        const std::size_t end = text.find(separator, begin);
        parts.push_back(text.substr(begin, end - begin));
        if (end == std::string_view::npos) return parts;
        begin = end + 1;
    }
}

namespace {

std::string text_of(std::int64_t x) { return std::to_string(x); }

std::string text_of(double x) {
    char buffer[64];
    const auto end = std::to_chars(buffer, buffer + sizeof buffer, x).ptr;
    return std::string(buffer, end);
}

bool read(std::string_view text, std::int64_t& x) { return read_number(text, x); }

bool read(std::string_view text, double& x) {
    if (!text.empty() && text.front() == '+') text.remove_prefix(1);
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), x);
    return error == std::errc() && end == text.data() + text.size() && x == x;
}

// 37+91+0, with NxM for N repeated M times.
bool read_list(std::string_view text, std::vector<std::int64_t>& list) {
    constexpr std::size_t kMostEntries = 1u << 20;
    list.clear();
    for (std::string_view part : split(text, '+')) {
        std::int64_t x = 0, times = 1;
        const std::size_t cross = part.find('x');
        if (cross != std::string_view::npos && !read(part.substr(cross + 1), times)) return false;
        if (!read(part.substr(0, cross), x) || times < 1) return false;
        if (list.size() + static_cast<std::uint64_t>(times) > kMostEntries) return false;
        list.insert(list.end(), static_cast<std::size_t>(times), x);
    }
    return true;
}

std::string text_of(const std::vector<std::int64_t>& list) {
    std::string text;
    for (std::size_t i = 0, j = 0; i < list.size(); i = j) {
        while (j < list.size() && list[j] == list[i]) ++j;
        if (!text.empty()) text += '+';
        text += text_of(list[i]);
        if (j - i > 1) text += 'x' + std::to_string(j - i);
    }
    return text;
}

template <class E>
using Names = std::vector<std::pair<const char*, E>>;

template <class E>
bool read_name(std::string_view text, const Names<E>& names, E& x) {
    for (const auto& [name, value] : names) {
        if (text == name) {
            x = value;
            return true;
        }
    }
    return false;
}

template <class E>
std::string text_of(const Names<E>& names, E x) {
    for (const auto& [name, value] : names) {
        if (value == x) return name;
    }
    return "?";
}

const Names<DType> kFloats = {{"f32", DType::f32}, {"bf16", DType::bf16}, {"f16", DType::f16}};
const Names<GateDraw::Kind> kDraws = {
    {"weak", GateDraw::Kind::weak},     {"typical", GateDraw::Kind::typical}, {"strong", GateDraw::Kind::strong},
    {"zero", GateDraw::Kind::zero},     {"mixed", GateDraw::Kind::mixed},     {"half0", GateDraw::Kind::half0},
    {"alpha0", GateDraw::Kind::alpha0}, {"cliff", GateDraw::Kind::cliff},     {"published", GateDraw::Kind::published}};

bool read_draw(std::string_view text, GateDraw& draw) {
    draw = {};
    if (read_name(text, kDraws, draw.kind)) return true;
    if (text.size() > 3 && text.substr(0, 2) == "u[" && text.back() == ']') {
        const auto ends = split(text.substr(2, text.size() - 3), ',');
        draw.kind = GateDraw::Kind::uniform;
        return ends.size() == 2 && read(ends[0], draw.low) && read(ends[1], draw.high) && draw.low >= 0 &&
               draw.high <= 1 && draw.low <= draw.high;
    }
    draw.kind = GateDraw::Kind::constant;
    return read(text, draw.low);
}

std::string text_of(const GateDraw& draw) {
    if (draw.kind == GateDraw::Kind::constant) return text_of(draw.low);
    if (draw.kind == GateDraw::Kind::uniform) return "u[" + text_of(draw.low) + "," + text_of(draw.high) + "]";
    return text_of(kDraws, draw.kind);
}

template <class Int>
Item size_item(const char* name, Int Case::*field, std::int64_t low, std::int64_t high, const char* allowed,
               const char* meaning) {
    return {Item::Style::size,
            name,
            allowed,
            meaning,
            [=](Case& c, std::string_view text) {
                std::int64_t x = 0;
                if (!read(text, x) || x < low || x > high) return false;
                c.*field = static_cast<Int>(x);
                return true;
            },
            [=](const Case& c) { return name + text_of(static_cast<std::int64_t>(c.*field)); }};
}

template <class Int>
Item count_item(const char* name, Int Case::*field, std::int64_t low, std::int64_t high, const char* allowed,
                const char* meaning) {
    Item item = size_item(name, field, low, high, allowed, meaning);
    item.style = Item::Style::value;
    item.print = [=](const Case& c) {
        if (c.*field == Case{}.*field) return std::string();
        return std::string(name) + "=" + std::to_string(c.*field);
    };
    return item;
}

Item flag_item(const char* name, bool Case::*field, bool when_present, const char* meaning) {
    return {Item::Style::flag,
            name,
            "",
            meaning,
            [=](Case& c, std::string_view) {
                c.*field = when_present;
                return true;
            },
            [=](const Case& c) { return c.*field == when_present ? std::string(name) : std::string(); }};
}

template <class E>
Item name_item(const char* name, E Case::*field, Names<E> names, const char* allowed, const char* meaning,
               bool always = false) {
    return {Item::Style::value,
            name,
            allowed,
            meaning,
            [=](Case& c, std::string_view text) { return read_name(text, names, c.*field); },
            [=](const Case& c) {
                if (!always && c.*field == Case{}.*field) return std::string();
                return std::string(name) + "=" + text_of(names, c.*field);
            }};
}

Item list_item(const char* name, std::vector<std::int64_t> Case::*field, std::int64_t low, const char* allowed,
               const char* meaning) {
    return {Item::Style::value,
            name,
            allowed,
            meaning,
            [=](Case& c, std::string_view text) {
                return read_list(text, c.*field) &&
                       std::all_of((c.*field).begin(), (c.*field).end(), [=](std::int64_t x) { return x >= low; });
            },
            [=](const Case& c) {
                return (c.*field).empty() ? std::string() : std::string(name) + "=" + text_of(c.*field);
            }};
}

Item dtype_item(const char* name, DType value) {
    return {Item::Style::flag,
            name,
            "",
            "type of q, k, v (and of o and the gradients, unless out= or grad= says f32)",
            [=](Case& c, std::string_view) {
                c.io = value;
                return true;
            },
            [=](const Case& c) { return c.io == value ? std::string(name) : std::string(); }};
}

Item beta_item() {
    return {Item::Style::value,
            "beta",
            "value, logit, none or a number",
            "value: in (0,1), used as it is; logit: N(0,1) through sigmoid; none: not given (1); a number: that value",
            [](Case& c, std::string_view text) {
                c.beta_given = text != "none";
                c.beta_mode = text == "logit" ? BetaMode::logit : BetaMode::value;
                c.beta_constant = false;
                c.beta_value = 0;
                if (text == "value" || text == "logit" || text == "none") return true;
                c.beta_constant = true;
                return read(text, c.beta_value);
            },
            [](const Case& c) -> std::string {
                if (!c.beta_given) return "beta=none";
                if (c.beta_constant) return "beta=" + text_of(c.beta_value);
                return c.beta_mode == BetaMode::logit ? "beta=logit" : "";
            }};
}

Item initial_item() {
    return {Item::Style::value,
            "h0",
            "a positive number (or no value: 0.3)",
            "give an initial state, drawn from N(0,1) times the number",
            [](Case& c, std::string_view text) {
                c.initial = true;
                return text.empty() || (read(text, c.initial_scale) && c.initial_scale > 0);
            },
            [](const Case& c) -> std::string {
                if (!c.initial) return "";
                return c.initial_scale == Case{}.initial_scale ? "h0" : "h0=" + text_of(c.initial_scale);
            }};
}

Item checkpoint_item() {
    return {Item::Style::value,
            "ckpt",
            "chunk, every:N with N from 1, or a list like 0:64+1:7 of sequence:token",
            "write checkpoint states",
            [](Case& c, std::string_view text) {
                c.checkpoint_list.clear();
                c.checkpoint_every = 0;
                if (text == "chunk") {
                    c.checkpoints = Checkpoints::chunk_starts;
                    return true;
                }
                if (text.substr(0, 6) == "every:") {
                    c.checkpoints = Checkpoints::every_n;
                    return read(text.substr(6), c.checkpoint_every) && c.checkpoint_every > 0;
                }
                c.checkpoints = Checkpoints::listed;
                for (std::string_view part : split(text, '+')) {
                    const auto pair = split(part, ':');
                    std::int64_t n = 0, t = 0;
                    if (pair.size() != 2 || !read(pair[0], n) || !read(pair[1], t)) return false;
                    c.checkpoint_list.emplace_back(n, t);
                }
                return true;
            },
            [](const Case& c) -> std::string {
                switch (c.checkpoints) {
                    case Checkpoints::none: return "";
                    case Checkpoints::chunk_starts: return "ckpt=chunk";
                    case Checkpoints::every_n: return "ckpt=every:" + text_of(c.checkpoint_every);
                    case Checkpoints::listed: break;
                }
                std::string text = "ckpt=";
                for (const auto& [n, t] : c.checkpoint_list) {
                    if (text.size() > 5) text += '+';
                    text += text_of(n) + ":" + text_of(t);
                }
                return text;
            }};
}

const std::vector<std::string> kGradients = {"d_q",    "d_k",     "d_v",       "d_g",
                                             "d_beta", "d_A_log", "d_dt_bias", "d_initial_state"};

Item skip_item() {
    return {Item::Style::value,
            "skip",
            "names joined by +: d_q, d_k, d_v, d_g, d_beta, d_A_log, d_dt_bias, d_initial_state",
            "gradients that are not wanted",
            [](Case& c, std::string_view text) {
                c.skip.clear();
                for (std::string_view part : split(text, '+')) {
                    if (std::find(kGradients.begin(), kGradients.end(), part) == kGradients.end()) return false;
                    c.skip.emplace_back(part);
                }
                return true;
            },
            [](const Case& c) {
                std::string text;
                for (const std::string& name : c.skip) text += (text.empty() ? "skip=" : "+") + name;
                return text;
            }};
}

Item drop_item() {
    return {Item::Style::value,
            "drop",
            "do, dht or do+dht",
            "incoming gradients that are absent",
            [](Case& c, std::string_view text) {
                c.drop_d_o = text == "do" || text == "do+dht";
                c.drop_d_final = text == "dht" || text == "do+dht";
                return c.drop_d_o || c.drop_d_final;
            },
            [](const Case& c) -> std::string {
                if (c.drop_d_o && c.drop_d_final) return "drop=do+dht";
                return c.drop_d_o ? "drop=do" : c.drop_d_final ? "drop=dht" : "";
            }};
}

Item split_prefill_item() {
    return {Item::Style::value,
            "split-prefill",
            "a number of tokens from 1 (or no value: half)",
            "two calls with the carried state equal one call",
            [](Case& c, std::string_view text) {
                c.split_prefill = -1;
                return text.empty() || (read(text, c.split_prefill) && c.split_prefill > 0);
            },
            [](const Case& c) -> std::string {
                if (c.split_prefill == 0) return "";
                return c.split_prefill < 0 ? "split-prefill" : "split-prefill=" + text_of(c.split_prefill);
            }};
}

Item same_item() {
    return {Item::Style::value,
            "same",
            "packed",
            "packed sequences equal separate calls (bitwise with inv, else within tolerance)",
            [](Case& c, std::string_view text) { return c.same_packed = text == "packed"; },
            [](const Case& c) -> std::string { return c.same_packed ? "same=packed" : ""; }};
}

Item backend_item() {
    return {Item::Style::value,
            "backend",
            "a name from `flashqla info`",
            "the backend under test; default the best",
            [](Case& c, std::string_view text) {
                c.backend = text;
                return !text.empty() &&
                       text.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_-") == std::string_view::npos;
            },
            [](const Case& c) { return c.backend.empty() ? std::string() : "backend=" + c.backend; }};
}

Item seed_item() {
    return {Item::Style::value,
            "seed",
            "a whole number from 0",
            "seed of the inputs",
            [](Case& c, std::string_view text) {
                std::int64_t x = 0;
                if (!read(text, x) || x < 0) return false;
                c.seed = static_cast<std::uint64_t>(x);
                return true;
            },
            [](const Case& c) { return c.seed == 1 ? std::string() : "seed=" + std::to_string(c.seed); }};
}

constexpr std::int64_t kBig = std::int64_t{1} << 36;
constexpr std::int64_t kHeads = 1 << 20, kDim = 1 << 16;
constexpr std::int64_t kAnyNumber = std::numeric_limits<std::int64_t>::min();

// NOTE: in groups because one list of all takes compilers minutes when sanitizers are on.

std::vector<Item> sizes() {
    return {
        size_item("b", &Case::batch, 0, kBig, "a whole number from 0", "B, batch"),
        {Item::Style::size, "t", "a whole number from 0", "T, tokens; with lens= the rows, padding included",
         [](Case& c, std::string_view text) { return read(text, c.tokens) && c.tokens >= 0 && c.tokens <= kBig; },
         [](const Case& c) {
             std::int64_t sum = 0;
             for (const std::int64_t n : c.lens) sum += n;
             std::string text = "t";
             text += text_of(c.tokens);
             return c.packed() && sum == c.tokens ? std::string() : text;
         }},
        size_item("hk", &Case::heads_k, 0, kHeads, "a whole number from 0", "Hk, key heads"),
        size_item("hv", &Case::heads_v, 0, kHeads, "a whole number from 0", "Hv, value heads; default Hk"),
        size_item("k", &Case::dim_k, 0, kDim, "a whole number from 0", "K, head size of q and k"),
        size_item("v", &Case::dim_v, 0, kDim, "a whole number from 0", "V, head size of v and o; default K"),
        dtype_item("f32", DType::f32),
        dtype_item("bf16", DType::bf16),
        dtype_item("f16", DType::f16),
    };
}

std::vector<Item> rule() {
    return {
        name_item("gate", &Case::gate,
                  Names<Gate>{{"log", Gate::log}, {"raw", Gate::raw}, {"none", Gate::none}, {"vector", Gate::vector}},
                  "log, raw, none or vector", "how g is understood", true),
        {Item::Style::value, "g",
         "weak, typical, strong, zero, mixed, half0, alpha0, cliff, published, a number or u[LOW,HIGH]",
         "distribution of g: cliff mixes 0, -50, -1000 and -1e4 by token; u[a,b] is log(U[a,b])",
         [](Case& c, std::string_view text) { return read_draw(text, c.g); },
         [](const Case& c) { return c.g == GateDraw{} ? std::string() : "g=" + text_of(c.g); }},
        beta_item(),
        flag_item("neg", &Case::negative, true, "beta_factor 2 (negative eigenvalues)"),
        flag_item("l2norm", &Case::l2norm, true, "normalise the rows of q and k inside"),
        {Item::Style::value, "scale", "a number other than 0", "scale of o; default K^-1/2",
         [](Case& c, std::string_view text) { return read(text, c.scale) && c.scale != 0; },
         [](const Case& c) { return c.scale == 0 ? std::string() : "scale=" + text_of(c.scale); }},
        name_item("layout", &Case::layout, Names<StateLayout>{{"kv", StateLayout::kv}, {"vk", StateLayout::vk}},
                  "kv or vk", "state layout"),
        name_item("group", &Case::grouping,
                  Names<Grouping>{{"interleaved", Grouping::interleaved}, {"tiled", Grouping::tiled}},
                  "interleaved or tiled", "which key head a value head reads"),
        name_item("keys", &Case::keys,
                  Names<Keys>{{"unit", Keys::unit}, {"normal", Keys::normal}, {"raw", Keys::raw}, {"same", Keys::same}},
                  "unit, normal, raw or same", "q and k: unit length; N(0,1/K); N(0,1); all keys of a head identical"),
    };
}

std::vector<Item> types() {
    const Names<DType> f32_only = {{"f32", DType::f32}};
    return {
        name_item("out", &Case::out, f32_only, "f32", "type of o"),
        name_item("grad", &Case::grad, f32_only, "f32", "type of d_q, d_k, d_v"),
        name_item("state", &Case::state, kFloats, "f32, bf16 or f16", "type of every state"),
        name_item("gtype", &Case::g_type, kFloats, "f32, bf16 or f16", "type of g, A_log and dt_bias"),
        name_item("btype", &Case::beta_type, kFloats, "f32, bf16 or f16", "type of beta"),
        list_item("lens", &Case::lens, 0, "lengths joined by +, each from 0, NxM for N repeated M times",
                  "packed sequences; rows of t beyond their sum are padding"),
        name_item("idx", &Case::index, Names<DType>{{"i32", DType::i32}, {"i64", DType::i64}}, "i32 or i64",
                  "type of cu_seqlens and of every index"),
        count_item("drows", &Case::decode_rows, 0, kBig, "a whole number from 0",
                   "the first N sequences are decode rows (mixed batch)"),
    };
}

std::vector<Item> states() {
    return {
        initial_item(),
        flag_item("noh0", &Case::initial, false, "no initial state (the default of fwd and bwd)"),
        flag_item("nofinal", &Case::final, false, "the final state is not wanted"),
        flag_item("inplace", &Case::in_place, true, "final_state is the memory of initial_state"),
        count_item("pool", &Case::pool, 1, kBig, "a whole number from 1",
                   "states live in a pool of N slots, updated in place"),
        list_item("slots", &Case::slots, kAnyNumber, "whole numbers joined by +",
                  "state_indices; default a seeded choice of the pool"),
        list_item("outslots", &Case::out_slots, kAnyNumber, "whole numbers joined by +", "state_indices_out"),
        name_item("pad", &Case::pad, Names<PadRule>{{"neg", PadRule::negative}, {"nonpos", PadRule::non_positive}},
                  "neg or nonpos", "which slots mark padding rows"),
        list_item("hasinit", &Case::has_initial, 0, "0 or 1 for each sequence, joined by +",
                  "has_initial_state; a 0 row holds NaN in its slot"),
    };
}

std::vector<Item> speculation() {
    return {
        checkpoint_item(),
        name_item("verify", &Case::verify,
                  Names<Verify>{{"slots", Verify::slots}, {"buffer", Verify::buffer}, {"tree", Verify::tree}},
                  "slots, buffer or tree",
                  "speculative decode: a slot per token; an intermediate buffer with commit(); a token tree"),
        count_item("columns", &Case::columns, 1, kBig, "a whole number from 1", "S of state_indices [N,S]; default T"),
        list_item("accepted", &Case::accepted, kAnyNumber, "whole numbers joined by +",
                  "num_accepted (slots), or what commit() accepts (buffer, tree)"),
        list_item("buf", &Case::buffer_rows, kAnyNumber, "whole numbers joined by +", "intermediate_indices"),
        flag_item("nocommit", &Case::commit, false, "commit_state = false"),
        drop_item(),
        skip_item(),
    };
}

std::vector<Item> plan() {
    return {
        flag_item("strided", &Case::strided, true,
                  "q, k, v are slices of one packed tensor, g and beta lie at odd element offsets, outputs, states and "
                  "indices have gaps"),
        count_item("threads", &Case::threads, 1, 4096, "a whole number from 1", "threads of the plan"),
        count_item("split", &Case::split, 1, 4096, "a whole number from 1", "context_split of the plan"),
        flag_item("det", &Case::deterministic, true, "PlanOptions::deterministic"),
        flag_item("inv", &Case::batch_invariant, true, "PlanOptions::batch_invariant"),
        seed_item(),
        backend_item(),
    };
}

std::vector<Item> properties() {
    return {
        same_item(),
        flag_item("alone", &Case::alone, true,
                  "every sequence alone equals the batch (bitwise with inv, else within tolerance)"),
        count_item("repeat", &Case::repeat, 2, 1 << 20, "a whole number from 2", "N runs give the same bits"),
        flag_item("threads-bitwise", &Case::threads_bitwise, true, "1, 2 and 3 threads give the same bits"),
        split_prefill_item(),
        flag_item("decode-equals-prefill", &Case::decode_equals_prefill, true,
                  "decode token by token equals this forward call"),
        count_item("relens", &Case::relens, 1, 1 << 20, "a whole number from 1",
                   "N more calls of one plan, cu_seqlens edited in place before each"),
        count_item("steps", &Case::steps, 2, 1 << 24, "a whole number from 2",
                   "N decode calls in a row against the oracle's one forward"),
        name_item("expect", &Case::expect,
                  Names<Expect>{{"ok", Expect::ok}, {"unsupported", Expect::unsupported}, {"invalid", Expect::invalid}},
                  "ok, unsupported or invalid", "the outcome that passes the check"),
    };
}

}  // namespace

const std::vector<Item>& items() {
    static const std::vector<Item> list = [] {
        std::vector<Item> all;
        for (auto* group : {sizes, rule, types, states, speculation, plan, properties}) {
            for (Item& item : group()) all.push_back(std::move(item));
        }
        return all;
    }();
    return list;
}

}  // namespace flashqla::cases
