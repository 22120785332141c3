// Reads config.json and refuses, in one sentence, what this program cannot compute.
#include <algorithm>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>

#include "layers.hpp"
#include "model.hpp"

namespace qwen3_next {
namespace {

using nlohmann::json;

class Reader {
public:
    explicit Reader(const std::string& path) : path_(path) {
        std::ifstream file(path);
        if (!file) throw std::runtime_error(path + " cannot be read");
        content_ = json::parse(file, nullptr, false);
        if (!content_.is_object()) fail("is not a JSON object");
    }

    [[noreturn]] void fail(const std::string& why) const { throw std::runtime_error(path_ + " " + why); }

    const json* find(const char* name) const {
        const auto found = content_.find(name);
        return found == content_.end() || found->is_null() ? nullptr : &*found;
    }

    std::int64_t size(const char* name, std::int64_t most) const {
        const json* value = find(name);
        if (!value || !value->is_number_integer()) fail(std::string("has no whole number ") + name);
        const auto number = value->get<std::int64_t>();
        if (number < 1 || number > most) {
            fail(std::string("says ") + name + " " + value->dump() + "; 1 to " + std::to_string(most) + " is allowed");
        }
        return number;
    }

    std::int64_t integer(const char* name, std::int64_t otherwise) const {
        const json* value = find(name);
        if (!value) return otherwise;
        if (!value->is_number_integer()) fail(std::string("says ") + name + " " + value->dump() + ", not a number");
        return value->get<std::int64_t>();
    }

    void expect(const char* name, const std::string& needed, const std::string& otherwise) const {
        const json* value = find(name);
        const json found = value ? *value : json(otherwise);
        if (found != needed)
            fail(std::string("says ") + name + " " + found.dump() + "; this program does \"" + needed + "\"");
    }

private:
    std::string path_;
    json content_;
};

// Attention and experts: an entry of layer_types, or the rule that older configurations rely on.
void refuse_other_layers(const Reader& reader, std::int64_t layers) {
    const json* types = reader.find("layer_types");
    if (types && (!types->is_array() || static_cast<std::int64_t>(types->size()) != layers)) {
        reader.fail("has a list layer_types whose length is not num_hidden_layers");
    }
    std::set<std::int64_t> dense;
    if (const json* list = reader.find("mlp_only_layers"); list && list->is_array()) {
        for (const json& layer : *list) {
            if (layer.is_number_integer()) dense.insert(layer.get<std::int64_t>());
        }
    }
    const std::int64_t attention_every = std::max<std::int64_t>(1, reader.integer("full_attention_interval", 4));
    const std::int64_t experts = reader.integer("num_experts", 512);
    const std::int64_t experts_every = std::max<std::int64_t>(1, reader.integer("decoder_sparse_step", 1));
    for (std::int64_t i = 0; i < layers; ++i) {
        const json type = types ? (*types)[static_cast<std::size_t>(i)]
                                : json((i + 1) % attention_every == 0 ? "full_attention" : "linear_attention");
        if (type != "linear_attention") {
            reader.fail("makes layer " + std::to_string(i) + " a layer of type " + type.dump() +
                        "; this program does \"linear_attention\" only");
        }
        if (experts > 0 && !dense.contains(i) && (i + 1) % experts_every == 0) {
            reader.fail("gives layer " + std::to_string(i) + " " + std::to_string(experts) +
                        " experts; this program does dense MLPs only");
        }
    }
}

}  // namespace

Config load_config(const std::string& path) {
    constexpr std::int64_t kMost = 1 << 20;
    const Reader reader(path);
    reader.expect("model_type", "qwen3_next", "");
    reader.expect("hidden_act", "silu", "silu");
    Config config;
    config.layers = reader.size("num_hidden_layers", 1024);
    refuse_other_layers(reader, config.layers);
    config.hidden = reader.size("hidden_size", kMost);
    config.intermediate = reader.size("intermediate_size", kMost);
    config.vocabulary = reader.size("vocab_size", kMost);
    config.heads_k = static_cast<std::int32_t>(reader.size("linear_num_key_heads", 1024));
    config.heads_v = static_cast<std::int32_t>(reader.size("linear_num_value_heads", 1024));
    config.dim_k = static_cast<std::int32_t>(reader.size("linear_key_head_dim", 1024));
    config.dim_v = static_cast<std::int32_t>(reader.size("linear_value_head_dim", 1024));
    config.conv_width = reader.size("linear_conv_kernel_dim", kMaxConvolutionWidth);
    if (config.vocabulary != 256) {
        reader.fail("says vocab_size " + std::to_string(config.vocabulary) +
                    "; this program has no tokenizer and needs 256, one id for each byte");
    }
    if (config.heads_v % config.heads_k != 0) {
        reader.fail("says linear_num_value_heads " + std::to_string(config.heads_v) + " with linear_num_key_heads " +
                    std::to_string(config.heads_k) + "; the first must be a multiple of the second");
    }
    const json* eps = reader.find("rms_norm_eps");
    config.eps = eps && eps->is_number() ? eps->get<float>() : 1e-6f;
    const json* tied = reader.find("tie_word_embeddings");
    config.tied = tied && tied->is_boolean() && tied->get<bool>();
    return config;
}

}  // namespace qwen3_next
