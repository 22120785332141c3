#include "cases/grammar.hpp"

#include <algorithm>

#include "cases/items.hpp"

namespace flashqla::cases {
namespace {

bool read_pass(std::string_view text, Pass& pass) {
    pass = text == "bwd" ? Pass::backward : text == "dec" ? Pass::decode : Pass::forward;
    return text == "fwd" || text == "bwd" || text == "dec";
}

const Item* find(Item::Style style, std::string_view name) {
    for (const Item& item : items()) {
        if (item.style == style && name == item.name) return &item;
    }
    return nullptr;
}

std::string complaint(std::size_t position, std::string_view found, const std::string& allowed) {
    return "case: at character " + std::to_string(position + 1) + ": found '" + std::string(found) + "'; allowed is " +
           allowed;
}

std::string known_items() {
    std::string text = "one of";
    for (const Item& item : items()) {
        text += std::string(" ") + item.name;
        if (item.style == Item::Style::size) text += "N";
        if (item.style == Item::Style::value) text += "=";
    }
    return text;
}

// "" or the sentence that says why the token is refused. Adds the item to those given so far.
std::string read_item(Case& c, std::string_view token, std::size_t position, std::vector<const Item*>& given) {
    const std::size_t equals = token.find('=');
    std::string_view name = token.substr(0, equals);
    std::string_view value = equals == std::string_view::npos ? std::string_view() : token.substr(equals + 1);
    const Item* item = nullptr;
    if (equals == std::string_view::npos) {
        item = find(Item::Style::flag, name);
        // These two are values whose value may be left out.
        if (!item && (name == "h0" || name == "split-prefill")) item = find(Item::Style::value, name);
        if (!item) {
            const std::size_t digits = name.find_first_of("0123456789");
            value = digits == std::string_view::npos ? std::string_view() : name.substr(digits);
            name = name.substr(0, digits);
            item = find(Item::Style::size, name);
        }
    } else {
        item = find(Item::Style::value, name);
        if (!item) item = find(Item::Style::size, name);
        if (value.empty()) {
            if (!item) return complaint(position, token, known_items());
            return complaint(position, token, std::string(item->name) + "= followed by " + item->allowed);
        }
    }
    if (!item) return complaint(position, token, known_items());
    if (std::find(given.begin(), given.end(), item) != given.end()) {
        return complaint(position, token, std::string(item->name) + " once");
    }
    given.push_back(item);
    if (item->read(c, value)) return "";
    return complaint(position, token, std::string(item->name) + " with " + item->allowed);
}

std::string require_count(const char* name, std::size_t found, std::int64_t allowed) {
    return "case: " + std::string(name) + " has " + std::to_string(found) + " entries; this case needs " +
           std::to_string(allowed);
}

// What items mean together. "" or a sentence.
std::string validate(const Case& c) {
    const std::int64_t count = c.sequences();
    std::int64_t sum = 0;
    for (const std::int64_t n : c.lens) sum += n;
    // Beyond this nothing can be allocated anyway, and products of sizes stay far from overflow.
    constexpr double kMostElements = 0x1p36;
    const double rows = static_cast<double>(c.batch) * static_cast<double>(c.tokens);
    const double widest = std::max({rows * c.heads_k * c.dim_k, rows * c.heads_v * c.dim_v, rows,
                                    static_cast<double>(std::max(count, c.pool)) * c.heads_v * c.dim_k * c.dim_v});
    if (widest > kMostElements) return "case: the largest tensor would have more than 2^36 elements; that is too many";
    if (c.packed() && c.batch != 1) {
        return "case: found b" + std::to_string(c.batch) + " with lens=; packed sequences need b1";
    }
    if (c.packed() && sum > c.tokens) {
        return "case: t is " + std::to_string(c.tokens) + "; lens adds up to " + std::to_string(sum) +
               ", so t must not be smaller";
    }
    const bool decode = c.pass == Pass::decode, per_token = c.verify == Verify::slots;
    const std::int64_t columns = per_token ? (c.columns ? c.columns : c.tokens) : 1;
    if (!c.slots.empty() && static_cast<std::int64_t>(c.slots.size()) != count * columns) {
        return require_count("slots", c.slots.size(), count * columns);
    }
    const auto per_sequence = [&](const char* name, const std::vector<std::int64_t>& list) {
        return list.empty() || static_cast<std::int64_t>(list.size()) == count
                   ? std::string()
                   : require_count(name, list.size(), count);
    };
    for (const std::string& error : {per_sequence("outslots", c.out_slots), per_sequence("hasinit", c.has_initial),
                                     per_sequence("accepted", c.accepted), per_sequence("buf", c.buffer_rows)}) {
        if (!error.empty()) return error;
    }
    if ((!c.slots.empty() || !c.out_slots.empty()) && c.pool == 0) {
        return "case: slots= and outslots= need pool=N";
    }
    if (decode && c.in_place) return "case: inplace belongs to fwd; decode always updates its pool in place";
    if (!decode && (c.verify != Verify::none || !c.commit || c.steps || !c.accepted.empty())) {
        return "case: verify=, accepted=, nocommit and steps= belong to dec";
    }
    if (c.verify == Verify::none && (!c.accepted.empty() || !c.buffer_rows.empty() || c.columns)) {
        return "case: accepted=, buf= and columns= need verify=";
    }
    if (c.pass != Pass::forward) {
        if (c.checkpoints != Checkpoints::none || c.split_prefill || c.decode_equals_prefill || c.relens) {
            return "case: ckpt=, split-prefill, decode-equals-prefill and relens= belong to fwd";
        }
    }
    if (c.pass == Pass::backward && (c.pool || c.in_place || !c.has_initial.empty())) {
        return "case: pool=, inplace and hasinit= do not belong to bwd";
    }
    if (c.pass != Pass::backward && (c.drop_d_o || c.drop_d_final || !c.skip.empty() || c.grad != DType::none)) {
        return "case: drop=, skip= and grad= belong to bwd";
    }
    if (c.in_place && (!c.initial || !c.final || c.pool)) return "case: inplace needs h0, a final state and no pool";
    if (c.relens && !c.packed()) return "case: relens= needs lens=";
    if ((c.split_prefill || c.decode_equals_prefill || c.relens || c.steps) && c.pool) {
        return "case: split-prefill, decode-equals-prefill, relens= and steps= do not go with pool=";
    }
    if ((c.split_prefill || c.decode_equals_prefill || c.steps) && c.packed()) {
        return "case: split-prefill, decode-equals-prefill and steps= do not go with lens=";
    }
    if (c.steps && c.verify != Verify::none) return "case: steps= does not go with verify=";
    return "";
}

}  // namespace

bool Case::wants(std::string_view output) const { return std::find(skip.begin(), skip.end(), output) == skip.end(); }

Parsed<Case> parse_case(std::string_view line) {
    Parsed<Case> result;
    Case& c = result.value;
    const std::size_t colon = line.find(':');
    const std::string_view pass = line.substr(0, colon);
    if (colon == std::string_view::npos || !read_pass(pass, c.pass)) {
        result.error = complaint(0, pass, "fwd:, bwd: or dec: followed by items");
        return result;
    }
    if (c.pass == Pass::decode) {
        c.tokens = 1;
        c.initial = true;
    }
    std::vector<const Item*> given;
    for (std::size_t begin = colon + 1; begin < line.size();) {
        std::size_t end = begin;
        for (int depth = 0; end < line.size() && (line[end] != ',' || depth > 0); ++end) {
            depth += line[end] == '[' ? 1 : line[end] == ']' ? -1 : 0;
        }
        const std::string_view token = line.substr(begin, end - begin);
        result.error = read_item(c, token, begin, given);
        if (!result.ok()) return result;
        begin = end + 1;
        if (end + 1 == line.size()) {
            result.error = complaint(end, ",", "an item after the comma");
            return result;
        }
    }
    const auto is_given = [&](std::string_view name) {
        return std::any_of(given.begin(), given.end(), [&](const Item* item) { return name == item->name; });
    };
    if (!is_given("hv")) c.heads_v = c.heads_k;
    if (!is_given("v")) c.dim_v = c.dim_k;
    if (c.packed() && !is_given("t")) {
        c.tokens = 0;
        for (const std::int64_t n : c.lens) c.tokens += n;
    }
    if (c.verify != Verify::none && c.pool == 0) {
        const std::int64_t columns = c.verify == Verify::slots ? (c.columns ? c.columns : c.tokens) : 1;
        c.pool = c.sequences() * columns + 2;
    }
    if (c.pool > 0 && c.pass == Pass::forward && !is_given("noh0")) c.initial = true;
    result.error = validate(c);
    return result;
}

std::string to_line(const Case& c) {
    std::string line = c.pass == Pass::forward ? "fwd:" : c.pass == Pass::backward ? "bwd:" : "dec:";
    const bool initial_is_default = c.pass == Pass::decode || (c.pass == Pass::forward && c.pool > 0);
    bool first = true;
    for (const Item& item : items()) {
        std::string text = item.print(c);
        // What the initial state defaults to depends on the pass, so these two are decided here.
        if (std::string_view(item.name) == "noh0") text = initial_is_default && !c.initial ? "noh0" : "";
        if (text == "h0" && initial_is_default) text = "";
        if (text.empty()) continue;
        line += (first ? "" : ",") + text;
        first = false;
    }
    return line;
}

Parsed<std::vector<std::string>> expand(std::string_view line) {
    constexpr std::size_t kMostCases = 100000;
    Parsed<std::vector<std::string>> result;
    std::string text(line);
    // t=1..200 -> t={1..200}, so that one rule is left.
    for (std::size_t dots = text.find(".."); dots != std::string::npos; dots = text.find("..", dots + 2)) {
        const std::size_t open = text.rfind('{', dots), shut = text.rfind('}', dots);
        if (open != std::string::npos && (shut == std::string::npos || shut < open)) continue;
        std::size_t begin = dots, end = dots + 2;
        while (begin > 0 && text[begin - 1] >= '0' && text[begin - 1] <= '9') --begin;
        while (end < text.size() && ((text[end] >= '0' && text[end] <= '9') || text[end] == ':')) ++end;
        text.insert(end, 1, '}');
        text.insert(begin, 1, '{');
        dots += 2;
    }
    std::vector<std::string> lines{""};
    for (std::size_t i = 0; i < text.size();) {
        std::vector<std::string> options;
        if (text[i] != '{') {
            const std::size_t end = std::min(text.find('{', i), text.size());
            options.push_back(text.substr(i, end - i));
            i = end;
        } else {
            const std::size_t end = text.find('}', i);
            if (end == std::string::npos) {
                result.error = complaint(i, text.substr(i), "a } that closes the {");
                return result;
            }
            for (std::string_view part : split(std::string_view(text).substr(i + 1, end - i - 1), '|')) {
                const std::size_t dots = part.find("..");
                if (dots == std::string_view::npos) {
                    options.emplace_back(part);
                    continue;
                }
                const std::size_t colon = part.find(':', dots);
                std::int64_t low = 0, high = 0, step = 1;
                if (!read_number(part.substr(0, dots), low) ||
                    !read_number(part.substr(dots + 2, colon - dots - 2), high) ||
                    (colon != std::string_view::npos && !read_number(part.substr(colon + 1), step)) || step < 1 ||
                    high < low || (high - low) / step >= static_cast<std::int64_t>(kMostCases)) {
                    result.error = complaint(i, part, "LOW..HIGH or LOW..HIGH:STEP with LOW <= HIGH and STEP >= 1");
                    return result;
                }
                for (std::int64_t x = low; x <= high; x += step) options.push_back(std::to_string(x));
            }
            i = end + 1;
        }
        if (lines.size() * options.size() > kMostCases) {
            result.error = "case: the sweep '" + std::string(line) + "' has more than 100000 cases";
            return result;
        }
        std::vector<std::string> longer;
        longer.reserve(lines.size() * options.size());
        for (const std::string& head : lines) {
            for (const std::string& option : options) longer.push_back(head + option);
        }
        lines = std::move(longer);
    }
    result.value = std::move(lines);
    return result;
}

std::string grammar_help() {
    std::string text =
        "A case is PASS:ITEM,ITEM,... with PASS fwd, bwd or dec, such as\n"
        "  fwd:b1,t8192,hk16,hv32,k128,v128,bf16,gate=log\n"
        "Sweeps: {a|b|c} and {1..200} or {1..200:7} stand for one case each; t=1..200 is short for t={1..200}.\n"
        "Items:\n";
    for (const Item& item : items()) {
        std::string name = item.name;
        if (item.style == Item::Style::size) name += "N";
        if (item.style == Item::Style::value) name += "=";
        name.resize(std::max<std::size_t>(name.size(), 22), ' ');
        text += "  " + name + " " + item.meaning;
        if (item.style == Item::Style::value) text += std::string(" (") + item.allowed + ")";
        text += "\n";
    }
    return text;
}

}  // namespace flashqla::cases
