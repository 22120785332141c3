#include "safetensors/safetensors.hpp"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

namespace flashqla::safetensors {
namespace {

using nlohmann::json;

struct TypeRow {
    const char* name;
    int bits;
    DType dtype;
};
constexpr TypeRow kTypes[] = {
    {"F32", 32, DType::f32},     {"F16", 16, DType::f16},  {"BF16", 16, DType::bf16},   {"I32", 32, DType::i32},
    {"I64", 64, DType::i64},     {"U8", 8, DType::u8},     {"BOOL", 8, DType::u8},      {"F64", 64, DType::none},
    {"I8", 8, DType::none},      {"I16", 16, DType::none}, {"U16", 16, DType::none},    {"U32", 32, DType::none},
    {"U64", 64, DType::none},    {"C64", 64, DType::none}, {"F8_E4M3", 8, DType::none}, {"F8_E5M2", 8, DType::none},
    {"F8_E8M0", 8, DType::none},
};

const TypeRow* find_type(const std::string& name) {
    const auto* at =
        std::find_if(std::begin(kTypes), std::end(kTypes), [&](const TypeRow& row) { return name == row.name; });
    return at == std::end(kTypes) ? nullptr : at;
}

std::string text_of(const std::vector<std::int64_t>& shape) {
    std::string text = "[";
    for (std::size_t i = 0; i < shape.size(); ++i) {
        if (i > 0) text += ',';
        text += std::to_string(shape[i]);
    }
    text += ']';
    return text;
}

// A name from the file, fit for a sentence: short, and without control characters.
std::string shown(const std::string& name) {
    std::string text = "'";
    for (const char c : name.substr(0, 60)) text += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
    return text + (name.size() > 60 ? "...'" : "'");
}

Content refuse(const std::string& sentence) {
    Content content;
    content.error = "safetensors: " + sentence;
    return content;
}

// The JSON object of the header. nlohmann keeps the last of two equal keys silently, and recurses once per nesting
// level, so the parse goes through a callback that refuses both.
json parse_header(const char* begin, const char* end, std::string& error) {
    std::vector<std::set<std::string>> keys;
    constexpr int kDeepest = 8;  // a valid header has three levels
    bool duplicate = false, deep = false;
    std::string which;
    const json::parser_callback_t watch = [&](int depth, json::parse_event_t event, json& value) {
        if (depth > kDeepest) deep = true;
        if (event == json::parse_event_t::object_start) keys.emplace_back();
        if (event == json::parse_event_t::object_end && !keys.empty()) keys.pop_back();
        if (event == json::parse_event_t::key && !keys.empty()) {
            const std::string& key = value.get_ref<const std::string&>();
            if (!keys.back().insert(key).second && !duplicate) {
                duplicate = true;
                which = key;
            }
        }
        return !deep;  // false drops the value, which keeps memory small in a hostile file
    };
    const json header = json::parse(begin, end, watch, /*allow_exceptions=*/false);
    if (header.is_discarded() && !deep) error = "the header is not valid JSON";
    if (deep) error = "the header is nested deeper than " + std::to_string(kDeepest) + " levels; a header has three";
    if (error.empty() && duplicate) error = "the header has the name " + shown(which) + " twice; names must be unique";
    if (error.empty() && !header.is_object()) error = "the header is JSON, but not an object of tensors";
    return header;
}

bool whole_number(const json& value, std::uint64_t& x) {
    if (!value.is_number_unsigned()) return false;
    x = value.get<std::uint64_t>();
    return true;
}

}  // namespace

std::int64_t Entry::elements() const noexcept {
    std::int64_t n = 1;
    for (const std::int64_t size : shape) n *= size;
    return n;
}

TensorView Entry::view() const noexcept {
    TensorView view;
    if (dtype == DType::none) return view;
    view.data = const_cast<std::byte*>(bytes.data());
    view.dtype = dtype;
    view.rank = static_cast<std::int32_t>(shape.size());
    std::int64_t stride = 1;
    for (std::size_t i = std::min<std::size_t>(shape.size(), kMaxRank); i-- > 0;) {
        view.shape[i] = shape[i];
        view.stride[i] = stride;
        stride *= shape[i];
    }
    return view;
}

const Entry* Content::find(const std::string& name) const {
    const auto at = tensors.find(name);
    return at == tensors.end() ? nullptr : &at->second;
}

Content parse(std::span<const std::byte> buffer) {
    if (buffer.size() < 8) {
        return refuse("the file has " + std::to_string(buffer.size()) +
                      " bytes; 8 bytes of header length are needed at least");
    }
    std::uint64_t length = 0;
    for (std::size_t i = 8; i-- > 0;) length = (length << 8) | std::to_integer<std::uint64_t>(buffer[i]);
    if (length > kMaxHeaderBytes) {
        return refuse("the header claims " + std::to_string(length) + " bytes; at most " +
                      std::to_string(kMaxHeaderBytes) + " are allowed");
    }
    if (length > buffer.size() - 8) {
        return refuse("the header claims " + std::to_string(length) + " bytes, but the file has only " +
                      std::to_string(buffer.size() - 8) + " after the length");
    }
    const char* text = reinterpret_cast<const char*>(buffer.data()) + 8;
    if (length == 0 || text[0] != '{') return refuse("the header does not start with '{'");
    std::string error;
    const json header = parse_header(text, text + length, error);
    if (!error.empty()) return refuse(error);

    Content content;
    const std::span<const std::byte> data = buffer.subspan(8 + static_cast<std::size_t>(length));
    struct Range {
        std::uint64_t begin, end;
        const std::string* name;
    };
    std::vector<Range> ranges;
    for (const auto& [name, value] : header.items()) {
        if (name == "__metadata__") {
            if (!value.is_object()) return refuse("__metadata__ is not an object of strings");
            for (const auto& [key, entry] : value.items()) {
                if (!entry.is_string()) return refuse("__metadata__ has " + shown(key) + ", which is not a string");
                content.metadata[key] = entry.get<std::string>();
            }
            continue;
        }
        const std::string who = "tensor " + shown(name);
        if (!value.is_object() || !value.contains("dtype") || !value.contains("shape") ||
            !value.contains("data_offsets")) {
            return refuse(who + " needs dtype, shape and data_offsets");
        }
        Entry entry;
        if (!value["dtype"].is_string()) return refuse(who + " has a dtype that is not a string");
        entry.dtype_name = value["dtype"].get<std::string>();
        const TypeRow* type = find_type(entry.dtype_name);
        if (!type) {
            std::string known;
            for (const TypeRow& row : kTypes) known += (known.empty() ? "" : ", ") + std::string(row.name);
            return refuse(who + " has dtype " + shown(entry.dtype_name) + "; known are " + known);
        }
        entry.dtype = type->dtype;
        if (!value["shape"].is_array()) return refuse(who + " has a shape that is not a list");
        std::uint64_t bytes = static_cast<std::uint64_t>(type->bits) / 8;
        bool overflow = false;
        for (const json& size : value["shape"]) {
            std::uint64_t x = 0;
            if (!whole_number(size, x) || x > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
                return refuse(who + " has a shape entry that is not a whole number from 0 to 2^63-1");
            }
            overflow = overflow || (x != 0 && bytes > std::numeric_limits<std::uint64_t>::max() / 2 / x);
            bytes *= x;
            entry.shape.push_back(static_cast<std::int64_t>(x));
        }
        if (overflow) return refuse(who + " has shape " + text_of(entry.shape) + ", whose product overflows");
        const json& offsets = value["data_offsets"];
        std::uint64_t begin = 0, end = 0;
        if (!offsets.is_array() || offsets.size() != 2 || !whole_number(offsets[0], begin) ||
            !whole_number(offsets[1], end)) {
            return refuse(who + " has data_offsets that are not two whole numbers");
        }
        if (begin > end || end > data.size()) {
            return refuse(who + " has data_offsets [" + std::to_string(begin) + "," + std::to_string(end) +
                          "]; they must be in order and at most " + std::to_string(data.size()) +
                          ", the bytes behind the header");
        }
        if (end - begin != bytes) {
            return refuse(who + " has " + std::to_string(end - begin) + " bytes; shape " + text_of(entry.shape) +
                          " of " + entry.dtype_name + " needs " + std::to_string(bytes));
        }
        entry.bytes = data.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(bytes));
        const auto at = content.tensors.emplace(name, std::move(entry)).first;
        ranges.push_back({begin, end, &at->first});
    }
    // The format wants the tensors side by side: no overlap, no hole, no bytes left over.
    std::sort(ranges.begin(), ranges.end(),
              [](const Range& a, const Range& b) { return a.begin != b.begin ? a.begin < b.begin : a.end < b.end; });
    std::uint64_t next = 0;
    for (const Range& range : ranges) {
        if (range.begin != next) {
            return refuse("tensor " + shown(*range.name) + " starts at byte " + std::to_string(range.begin) +
                          " of the data; the tensor before it ends at " + std::to_string(next) +
                          (range.begin < next ? ", so they overlap" : ", so there is a hole"));
        }
        next = range.end;
    }
    if (next != data.size()) {
        return refuse("the tensors end at byte " + std::to_string(next) + " of the data, but the file has " +
                      std::to_string(data.size()) + "; nothing may follow them");
    }
    return content;
}

File read(const std::string& path) {
    File file;
    std::ifstream stream(path, std::ios::binary | std::ios::ate);
    const std::streamoff size = stream ? static_cast<std::streamoff>(stream.tellg()) : -1;
    // A directory opens, too, and then claims the largest size there is.
    if (size < 0 || size == std::numeric_limits<std::streamoff>::max()) {
        file.content = refuse("'" + path + "' cannot be read; a readable file is needed");
        return file;
    }
    file.buffer = std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(size));
    stream.seekg(0);
    stream.read(reinterpret_cast<char*>(file.buffer->data()), size);
    if (!stream) {
        file.content = refuse("'" + path + "' cannot be read to its end");
        return file;
    }
    file.content = parse(*file.buffer);
    if (!file.content.ok()) {
        file.content.error = path + ": " + file.content.error;
        return file;
    }
    for (auto& [name, entry] : file.content.tensors) {
        const std::size_t width = std::max<std::size_t>(size_of(entry.dtype), 1);
        if (reinterpret_cast<std::uintptr_t>(entry.bytes.data()) % width == 0) continue;
        file.moved.push_back(std::make_shared<std::vector<std::byte>>(entry.bytes.begin(), entry.bytes.end()));
        entry.bytes = *file.moved.back();
    }
    return file;
}

std::vector<std::byte> serialize(const std::vector<Named>& tensors,
                                 const std::map<std::string, std::string>& metadata) {
    json header = json::object();
    if (!metadata.empty()) header["__metadata__"] = metadata;
    // By falling element size, then by name, as other writers do: everything stays aligned.
    std::vector<const Named*> order;
    for (const Named& tensor : tensors) order.push_back(&tensor);
    std::sort(order.begin(), order.end(), [](const Named* a, const Named* b) {
        const std::size_t x = size_of(a->view.dtype), y = size_of(b->view.dtype);
        return x != y ? x > y : a->name < b->name;
    });
    std::vector<std::byte> data;
    for (const Named* tensor : order) {
        const TensorView& view = tensor->view;
        const std::size_t width = size_of(view.dtype), begin = data.size();
        std::vector<std::int64_t> index(static_cast<std::size_t>(view.rank), 0), shape;
        std::int64_t count = 1;
        for (std::size_t i = 0; i < index.size(); ++i) {
            shape.push_back(view.shape[i]);
            count *= view.shape[i];
        }
        data.resize(begin + static_cast<std::size_t>(count) * width);
        for (std::int64_t n = 0; n < count; ++n) {
            std::int64_t offset = 0;
            for (std::size_t i = 0; i < index.size(); ++i) offset += index[i] * view.stride[i];
            std::memcpy(data.data() + begin + static_cast<std::size_t>(n) * width,
                        static_cast<const std::byte*>(view.data) + offset * static_cast<std::int64_t>(width), width);
            for (std::size_t i = index.size(); i-- > 0;) {
                if (++index[i] < shape[i]) break;
                index[i] = 0;
            }
        }
        const auto* type = std::find_if(std::begin(kTypes), std::end(kTypes),
                                        [&](const TypeRow& row) { return row.dtype == view.dtype; });
        header[tensor->name] = {{"dtype", type->name}, {"shape", shape}, {"data_offsets", {begin, data.size()}}};
    }
    std::string text = header.dump(-1, ' ', false, json::error_handler_t::replace);
    text.resize((text.size() + 7) / 8 * 8, ' ');
    std::vector<std::byte> bytes(8 + text.size() + data.size());
    for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<std::byte>(std::uint64_t{text.size()} >> (8 * i));
    std::memcpy(bytes.data() + 8, text.data(), text.size());
    std::copy(data.begin(), data.end(), bytes.begin() + static_cast<std::ptrdiff_t>(8 + text.size()));
    return bytes;
}

std::string write(const std::string& path, const std::vector<Named>& tensors,
                  const std::map<std::string, std::string>& metadata) {
    const std::vector<std::byte> bytes = serialize(tensors, metadata);
    std::ofstream stream(path, std::ios::binary);
    stream.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    stream.close();
    return stream ? "" : "safetensors: '" + path + "' cannot be written";
}

}  // namespace flashqla::safetensors
