#include "safetensors/safetensors.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

namespace flashqla::safetensors {
namespace {

std::vector<std::byte> file_of(const std::string& header, std::size_t data_bytes, std::uint64_t claimed = ~0ull) {
    const std::uint64_t length = claimed == ~0ull ? header.size() : claimed;
    std::vector<std::byte> bytes(8 + header.size() + data_bytes);
    for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<std::byte>(length >> (8 * i));
    std::memcpy(bytes.data() + 8, header.data(), header.size());
    return bytes;
}

std::string error_of(const std::string& header, std::size_t data_bytes, std::uint64_t claimed = ~0ull) {
    const std::vector<std::byte> bytes = file_of(header, data_bytes, claimed);
    const Content content = parse(bytes);
    EXPECT_FALSE(content.ok()) << header;
    EXPECT_TRUE(content.tensors.empty());
    EXPECT_EQ(content.error.find('\n'), std::string::npos);
    return content.error;
}

bool mentions(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

TEST(Safetensors, RoundTrip) {
    const float a[6] = {1, 2, 3, 4, 5, 6};
    const std::uint16_t b[2] = {0x3f80, 0x4000};
    const std::int64_t n[1] = {-7};
    const std::vector<std::byte> bytes = serialize({{"a", tensor(a, DType::f32, {2, 3})},
                                                    {"b", tensor(b, DType::bf16, {2})},
                                                    {"turned", tensor(a, DType::f32, {3, 2}, {1, 3})},
                                                    {"größe", tensor(n, DType::i64, {})},
                                                    {"none", tensor(a, DType::f32, {0, 4})}},
                                                   {{"format", "pt"}});
    const Content content = parse(bytes);
    ASSERT_TRUE(content.ok()) << content.error;
    EXPECT_EQ(content.tensors.size(), 5u);
    EXPECT_EQ(content.metadata.at("format"), "pt");
    EXPECT_EQ(content.find("a")->shape, (std::vector<std::int64_t>{2, 3}));
    EXPECT_EQ(std::memcmp(content.find("a")->bytes.data(), a, sizeof a), 0);
    EXPECT_EQ(content.find("b")->dtype_name, "BF16");
    EXPECT_EQ(content.find("größe")->elements(), 1);
    const float turned[6] = {1, 4, 2, 5, 3, 6};
    EXPECT_EQ(std::memcmp(content.find("turned")->bytes.data(), turned, sizeof turned), 0);
    EXPECT_EQ(content.find("x"), nullptr);
    // Header padded to 8 bytes, as alignment of the data needs.
    EXPECT_EQ(std::to_integer<int>(bytes[0]) % 8, 0);
}

TEST(Safetensors, FileOnDisk) {
    const std::string path = testing::TempDir() + "/fqla_safetensors_test.safetensors";
    const float a[2] = {1, 2};
    ASSERT_EQ(write(path, {{"a", tensor(a, DType::f32, {2})}}), "");
    const File file = read(path);
    ASSERT_TRUE(file.content.ok()) << file.content.error;
    EXPECT_EQ(file.content.find("a")->view().shape[0], 2);
    std::remove(path.c_str());
    EXPECT_TRUE(mentions(read(path).content.error, "cannot be read"));
    EXPECT_TRUE(mentions(read(testing::TempDir()).content.error, "cannot be read"));
    EXPECT_TRUE(mentions(write("/nonexistent/x", {}), "cannot be written"));
}

TEST(Safetensors, MisalignedDataIsMoved) {
    const std::string path = testing::TempDir() + "/fqla_safetensors_moved.safetensors";
    const std::vector<std::byte> bytes = file_of(
        R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})",
        5);
    std::FILE* stream = std::fopen(path.c_str(), "wb");
    ASSERT_NE(stream, nullptr);
    std::fwrite(bytes.data(), 1, bytes.size(), stream);
    std::fclose(stream);
    const File file = read(path);
    ASSERT_TRUE(file.content.ok()) << file.content.error;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(file.content.find("b")->view().data) % 4, 0u);
    std::remove(path.c_str());
}

TEST(Safetensors, HostileFiles) {
    EXPECT_TRUE(mentions(parse({}).error, "0 bytes"));
    EXPECT_TRUE(mentions(error_of("{}", 0, 3), "but the file has only 2"));
    EXPECT_TRUE(mentions(error_of("{}", 0, 1ull << 40), "at most 100000000"));
    EXPECT_TRUE(mentions(error_of("{}", 0, ~0ull - 1), "at most 100000000"));
    EXPECT_TRUE(mentions(error_of("", 0), "does not start with '{'"));
    EXPECT_TRUE(mentions(error_of("[1]", 0), "does not start with '{'"));
    EXPECT_TRUE(mentions(error_of("{\"a\":", 0), "not valid JSON"));
    EXPECT_TRUE(mentions(error_of("{\"a\":1}", 0), "needs dtype, shape and data_offsets"));
    EXPECT_TRUE(mentions(error_of(std::string("{\"a\xff\":1}"), 0), "not valid JSON"));
    std::string deep = "{\"a\":";
    for (int i = 0; i < 100000; ++i) deep += "[";
    EXPECT_TRUE(mentions(error_of(deep, 0), "nested deeper"));
    const auto one = [](const char* dtype, const char* shape, const char* offsets) {
        return std::string("{\"a\":{\"dtype\":\"") + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets +
               "}}";
    };
    EXPECT_TRUE(mentions(error_of(one("F99", "[1]", "[0,4]"), 4), "dtype 'F99'"));
    EXPECT_TRUE(mentions(error_of(one("F32", "[2]", "[0,4]"), 4), "needs 8"));
    EXPECT_TRUE(mentions(error_of(one("F32", "[1]", "[0,8]"), 4), "at most 4"));
    EXPECT_TRUE(mentions(error_of(one("F32", "[1]", "[4,0]"), 4), "in order"));
    EXPECT_TRUE(mentions(error_of(one("F32", "[1]", "[0,18446744073709551615]"), 4), "at most 4"));
    EXPECT_TRUE(mentions(error_of(one("F32", "[1]", "[-4,0]"), 4), "not two whole numbers"));
    EXPECT_TRUE(mentions(error_of(one("F32", "[1]", "[0]"), 4), "not two whole numbers"));
    EXPECT_TRUE(mentions(error_of(one("F32", "[1.0]", "[0,4]"), 4), "shape entry"));
    EXPECT_TRUE(mentions(error_of(one("F32", "[-1]", "[0,4]"), 4), "shape entry"));
    EXPECT_TRUE(mentions(error_of(one("F32", "7", "[0,4]"), 4), "not a list"));
    EXPECT_TRUE(mentions(error_of(one("F32", "[4294967296,4294967296]", "[0,4]"), 4), "overflows"));
    EXPECT_TRUE(mentions(error_of(one("F32", "[9223372036854775807,2,2]", "[0,4]"), 4), "overflows"));
    EXPECT_TRUE(mentions(error_of(one("F32", "[1]", "[0,4]"), 8), "nothing may follow"));
    const std::string a = R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
    EXPECT_TRUE(mentions(error_of("{" + a + "," + a + "}", 4), "'a' twice"));
    EXPECT_TRUE(
        mentions(error_of("{" + a + R"(,"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})", 6), "overlap"));
    EXPECT_TRUE(mentions(error_of("{" + a + R"(,"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}})", 12), "hole"));
    EXPECT_TRUE(mentions(error_of(R"({"__metadata__":{"x":1}})", 0), "not a string"));
    EXPECT_TRUE(mentions(error_of(R"({"__metadata__":[]})", 0), "not an object"));
}

TEST(Safetensors, EveryTruncationAndRandomDamageIsSurvived) {
    const float a[64] = {};
    const std::vector<std::byte> good =
        serialize({{"a", tensor(a, DType::f32, {4, 4})}, {"b", tensor(a, DType::f16, {3})}}, {{"k", "v"}});
    ASSERT_TRUE(parse(good).ok());
    for (std::size_t n = 0; n < good.size(); ++n) {
        EXPECT_FALSE(parse(std::span(good).first(n)).ok()) << n;
    }
    std::mt19937 random(7);
    for (int i = 0; i < 20000; ++i) {
        std::vector<std::byte> bad = good;
        for (std::size_t n = 1 + random() % 4; n > 0; --n)
            bad[random() % bad.size()] = static_cast<std::byte>(random());
        const Content content = parse(bad);
        for (const auto& [name, entry] : content.tensors) {
            EXPECT_GE(entry.bytes.data(), bad.data());
            EXPECT_LE(entry.bytes.data() + entry.bytes.size(), bad.data() + bad.size());
            EXPECT_EQ(entry.bytes.size() % std::max<std::size_t>(size_of(entry.dtype), 1), 0u);
        }
    }
}

}  // namespace
}  // namespace flashqla::safetensors
