// Checkpoints that the program cannot run end in one sentence.
#include <gtest/gtest.h>

#include <bit>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "fixture.hpp"
#include "flashqla/flashqla.hpp"
#include "safetensors/safetensors.hpp"

namespace qwen3_next {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

class Checkpoint : public testing::Test {
protected:
    void SetUp() override {
        directory_ = fs::path(testing::TempDir()) /
                     ("qwen3_next_" + std::string(testing::UnitTest::GetInstance()->current_test_info()->name()));
        fs::create_directories(directory_);
        config_ = json::parse(std::ifstream(kDirectory + "/config.json"));
    }
    void TearDown() override { fs::remove_all(directory_); }

    std::string path(const char* name) const { return (directory_ / name).string(); }

    // The sentence that load_model says, without the path.
    std::string refusal() {
        std::ofstream(path("config.json")) << config_.dump();
        try {
            load_model(directory_.string());
        } catch (const std::runtime_error& error) {
            std::string text = error.what();
            if (const auto at = text.find(directory_.string()); at != std::string::npos) {
                text.erase(at, directory_.string().size() + 1);
            }
            return text;
        }
        return "accepted";
    }

    fs::path directory_;
    json config_;
};

TEST_F(Checkpoint, Experts) {
    config_["num_experts"] = 8;
    config_["mlp_only_layers"] = {0, 1};
    EXPECT_EQ(refusal(), "config.json gives layer 2 8 experts; this program does dense MLPs only");
}

TEST_F(Checkpoint, Attention) {
    config_["layer_types"][3] = "full_attention";
    EXPECT_EQ(
        refusal(),
        "config.json makes layer 3 a layer of type \"full_attention\"; this program does \"linear_attention\" only");
}

TEST_F(Checkpoint, AttentionByInterval) {
    config_.erase("layer_types");
    EXPECT_EQ(
        refusal(),
        "config.json makes layer 3 a layer of type \"full_attention\"; this program does \"linear_attention\" only");
}

TEST_F(Checkpoint, OtherModels) {
    config_["model_type"] = "llama";
    EXPECT_EQ(refusal(), "config.json says model_type \"llama\"; this program does \"qwen3_next\"");
}

TEST_F(Checkpoint, OtherActivations) {
    config_["hidden_act"] = "gelu";
    EXPECT_EQ(refusal(), "config.json says hidden_act \"gelu\"; this program does \"silu\"");
}

TEST_F(Checkpoint, Heads) {
    config_["linear_num_value_heads"] = 3;
    EXPECT_EQ(refusal(),
              "config.json says linear_num_value_heads 3 with linear_num_key_heads 2; the first must be a "
              "multiple of the second");
}

TEST_F(Checkpoint, Vocabulary) {
    config_["vocab_size"] = 151936;
    EXPECT_EQ(refusal(),
              "config.json says vocab_size 151936; this program has no tokenizer and needs 256, one id for "
              "each byte");
}

TEST_F(Checkpoint, Sizes) {
    config_["hidden_size"] = -1;
    EXPECT_EQ(refusal(), "config.json says hidden_size -1; 1 to 1048576 is allowed");
    config_["hidden_size"] = "wide";
    EXPECT_EQ(refusal(), "config.json has no whole number hidden_size");
    config_.erase("hidden_size");
    EXPECT_EQ(refusal(), "config.json has no whole number hidden_size");
}

TEST_F(Checkpoint, NoJson) {
    config_ = json::array();
    EXPECT_EQ(refusal(), "config.json is not a JSON object");
}

TEST_F(Checkpoint, NoFile) {
    EXPECT_THROW(load_model(path("nothing")), std::runtime_error);
    EXPECT_NE(refusal().find("model.safetensors"), std::string::npos);
}

TEST_F(Checkpoint, MissingTensor) {
    const float zero = 0;
    const auto error = flashqla::safetensors::write(
        path("model.safetensors"), {{"something", flashqla::tensor(&zero, flashqla::DType::f32, {1})}});
    ASSERT_EQ(error, "");
    EXPECT_EQ(refusal(), "model.safetensors has no tensor model.embed_tokens.weight");
}

TEST_F(Checkpoint, WrongShape) {
    const std::vector<float> zeros(6);
    const auto error = flashqla::safetensors::write(
        path("model.safetensors"),
        {{"model.embed_tokens.weight", flashqla::tensor(zeros.data(), flashqla::DType::f32, {2, 3})}});
    ASSERT_EQ(error, "");
    EXPECT_EQ(refusal(),
              "model.safetensors: tensor model.embed_tokens.weight has shape [2,3]; the configuration needs "
              "[256,256]");
}

TEST_F(Checkpoint, TruncatedFile) {
    fs::copy_file(kDirectory + "/model.safetensors", path("model.safetensors"));
    fs::resize_file(path("model.safetensors"), 1'000'000);
    EXPECT_NE(refusal(), "accepted");
}

// The same weights in f32, and with an output matrix of their own.
TEST_F(Checkpoint, OtherTypes) {
    const auto file = flashqla::safetensors::read(kDirectory + "/model.safetensors");
    ASSERT_TRUE(file.content.ok());
    std::vector<std::vector<float>> values;
    std::vector<flashqla::safetensors::Named> tensors;
    for (const auto& [name, entry] : file.content.tensors) {
        auto& wide = values.emplace_back(static_cast<std::size_t>(entry.elements()));
        for (std::size_t i = 0; i < wide.size(); ++i) {
            wide[i] =
                std::bit_cast<float>(std::uint32_t{static_cast<const std::uint16_t*>(entry.view().data)[i]} << 16);
        }
        flashqla::TensorView view = entry.view();
        view.data = wide.data();
        view.dtype = flashqla::DType::f32;
        tensors.push_back({name, view});
        if (name == "model.embed_tokens.weight") tensors.push_back({"lm_head.weight", view});
    }
    ASSERT_EQ(flashqla::safetensors::write(path("model.safetensors"), tensors), "");
    config_["tie_word_embeddings"] = false;
    ASSERT_EQ(refusal(), "accepted");
    const Model other = load_model(directory_.string());
    EXPECT_EQ(other.embedding, model().embedding);
    Network a(model(), {.users = 1, .max_rows = 16}), b(other, {.users = 1, .max_rows = 16});
    const auto first = a.read(0, "def f(x):"), second = b.read(0, "def f(x):");
    EXPECT_TRUE(std::ranges::equal(first, second));
}

}  // namespace
}  // namespace qwen3_next
