#include "model.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <stdexcept>

#include "safetensors/safetensors.hpp"

namespace qwen3_next {
namespace {

using flashqla::DType;
using Shape = std::initializer_list<std::int64_t>;

float from_f16(std::uint16_t bits) {
    const float sign = bits & 0x8000 ? -1.0f : 1.0f;
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
    return sign * (exponent ? std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25)
                            : std::ldexp(static_cast<float>(mantissa), -24));
}

std::vector<float> to_floats(const flashqla::safetensors::Entry& entry) {
    std::vector<float> values(static_cast<std::size_t>(entry.elements()));
    if (entry.dtype == DType::f32) {
        std::memcpy(values.data(), entry.bytes.data(), entry.bytes.size());
        return values;
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
        std::uint16_t bits;
        std::memcpy(&bits, entry.bytes.data() + 2 * i, 2);
        values[i] = entry.dtype == DType::f16 ? from_f16(bits) : std::bit_cast<float>(std::uint32_t{bits} << 16);
    }
    return values;
}

template <class Sizes>
std::string text_of(const Sizes& sizes) {
    std::string text;
    for (const std::int64_t size : sizes) text += (text.empty() ? "" : ",") + std::to_string(size);
    return "[" + text + "]";
}

class Checkpoint {
public:
    explicit Checkpoint(const std::string& path) : path_(path), file_(flashqla::safetensors::read(path)) {
        if (!file_.content.ok()) throw std::runtime_error(file_.content.error);
    }

    std::vector<float> load(const std::string& name, Shape shape) {
        const auto* entry = file_.content.find(name);
        if (!entry) throw std::runtime_error(path_ + " has no tensor " + name);
        if (!std::ranges::equal(entry->shape, shape)) {
            throw std::runtime_error(path_ + ": tensor " + name + " has shape " + text_of(entry->shape) +
                                     "; the configuration needs " + text_of(shape));
        }
        if (entry->dtype != DType::f32 && entry->dtype != DType::f16 && entry->dtype != DType::bf16) {
            throw std::runtime_error(path_ + ": tensor " + name + " is of type " + entry->dtype_name +
                                     "; f32, f16 and bf16 are allowed");
        }
        parameters_ += entry->elements();
        return to_floats(*entry);
    }

    // The file holds w, the norm multiplies by 1 + w.
    std::vector<float> load_norm(const std::string& name, std::int64_t size) {
        std::vector<float> factor = load(name, {size});
        for (float& value : factor) value += 1.0f;
        return factor;
    }

    std::int64_t parameters() const { return parameters_; }

private:
    std::string path_;
    flashqla::safetensors::File file_;
    std::int64_t parameters_ = 0;
};

// Both projections of the input, in the order q | k | v | z | b | a. For each key head the checkpoint has
// q [K], k [K], v [R,V], z [R,V] in one tensor and b [R], a [R] in another, R = Hv / Hk.
Matrix load_in_proj(Checkpoint& file, const std::string& prefix, const Config& c) {
    const std::int64_t ratio = c.heads_v / c.heads_k, values = ratio * c.dim_v, group = 2 * (c.dim_k + values);
    const auto qkvz = file.load(prefix + "in_proj_qkvz.weight", {c.heads_k * group, c.hidden});
    const auto ba = file.load(prefix + "in_proj_ba.weight", {2 * c.heads_v, c.hidden});

    std::vector<float> sorted;
    sorted.reserve(qkvz.size() + ba.size());
    const auto append = [&](const std::vector<float>& from, std::int64_t rows_of_group, std::int64_t first,
                            std::int64_t count) {
        for (std::int64_t j = 0; j < c.heads_k; ++j) {
            const auto begin = from.begin() + (j * rows_of_group + first) * c.hidden;
            sorted.insert(sorted.end(), begin, begin + count * c.hidden);
        }
    };
    append(qkvz, group, 0, c.dim_k);                    // q
    append(qkvz, group, c.dim_k, c.dim_k);              // k
    append(qkvz, group, 2 * c.dim_k, values);           // v
    append(qkvz, group, 2 * c.dim_k + values, values);  // z
    append(ba, 2 * ratio, 0, ratio);                    // b
    append(ba, 2 * ratio, ratio, ratio);                // a
    return Matrix(sorted, c.projection(), c.hidden);
}

std::vector<float> load_conv(Checkpoint& file, const std::string& name, const Config& c) {
    const std::int64_t channels = c.conv_channels(), width = c.conv_width;
    const auto stored = file.load(name, {channels, 1, width});
    std::vector<float> conv(stored.size());  // [width, channels], so that a step runs along the channels
    for (std::int64_t i = 0; i < channels; ++i) {
        for (std::int64_t j = 0; j < width; ++j) {
            conv[static_cast<std::size_t>(j * channels + i)] = stored[static_cast<std::size_t>(i * width + j)];
        }
    }
    return conv;
}

LayerWeights load_layer(Checkpoint& file, std::int64_t index, const Config& c) {
    const std::string prefix = "model.layers." + std::to_string(index) + ".", gdn = prefix + "linear_attn.";
    LayerWeights layer;
    layer.input_norm = file.load_norm(prefix + "input_layernorm.weight", c.hidden);
    layer.gdn.in_proj = load_in_proj(file, gdn, c);
    layer.gdn.conv = load_conv(file, gdn + "conv1d.weight", c);
    layer.gdn.A_log = file.load(gdn + "A_log", {c.heads_v});
    layer.gdn.dt_bias = file.load(gdn + "dt_bias", {c.heads_v});
    layer.gdn.norm = file.load(gdn + "norm.weight", {c.dim_v});
    layer.gdn.out_proj =
        Matrix(file.load(gdn + "out_proj.weight", {c.hidden, c.value_size()}), c.hidden, c.value_size());

    layer.mlp_norm = file.load_norm(prefix + "post_attention_layernorm.weight", c.hidden);
    std::vector<float> gate_up = file.load(prefix + "mlp.gate_proj.weight", {c.intermediate, c.hidden});
    const std::vector<float> up = file.load(prefix + "mlp.up_proj.weight", {c.intermediate, c.hidden});
    gate_up.insert(gate_up.end(), up.begin(), up.end());
    layer.gate_up = Matrix(gate_up, 2 * c.intermediate, c.hidden);
    layer.down =
        Matrix(file.load(prefix + "mlp.down_proj.weight", {c.hidden, c.intermediate}), c.hidden, c.intermediate);
    return layer;
}

}  // namespace

Model load_model(const std::string& directory) {
    Model model;
    const Config& c = model.config = load_config(directory + "/config.json");
    Checkpoint file(directory + "/model.safetensors");
    model.embedding = file.load("model.embed_tokens.weight", {c.vocabulary, c.hidden});
    for (std::int64_t i = 0; i < c.layers; ++i) model.layers.push_back(load_layer(file, i, c));
    model.final_norm = file.load_norm("model.norm.weight", c.hidden);
    model.output = Matrix(c.tied ? model.embedding : file.load("lm_head.weight", {c.vocabulary, c.hidden}),
                          c.vocabulary, c.hidden);
    model.parameters = file.parameters();
    return model;
}

}  // namespace qwen3_next
