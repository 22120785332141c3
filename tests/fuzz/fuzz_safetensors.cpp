// Any bytes as a safetensors file: one sentence, or tensors that lie inside the file and survive writing and reading.
#include <cstring>

#include "fuzz_input.hpp"
#include "safetensors/safetensors.hpp"

using namespace flashqla;

namespace {

void check_entry(const safetensors::Entry& entry, std::span<const std::byte> file) {
    const std::byte *begin = file.data(), *end = begin + file.size();
    fuzz::require(
        entry.bytes.empty() || (entry.bytes.data() >= begin && entry.bytes.data() + entry.bytes.size() <= end),
        "a tensor lies inside the file");
    unsigned sum = 0;
    for (const std::byte b : entry.bytes) sum += std::to_integer<unsigned>(b);
    fuzz::require(sum <= 255u * entry.bytes.size(), "bytes can be read");
    for (const std::int64_t size : entry.shape) fuzz::require(size >= 0, "sizes are not negative");
    if (entry.dtype != DType::none) {
        fuzz::require(static_cast<std::uint64_t>(entry.elements()) * size_of(entry.dtype) == entry.bytes.size(),
                      "shape and bytes agree");
    }
}

bool fits_a_view(const safetensors::Entry& entry) {
    return entry.dtype != DType::none && entry.shape.size() <= static_cast<std::size_t>(kMaxRank) &&
           reinterpret_cast<std::uintptr_t>(entry.bytes.data()) % size_of(entry.dtype) == 0;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const auto file = std::as_bytes(std::span(data, size));
    const safetensors::Content content = safetensors::parse(file);
    if (!content.ok()) {
        fuzz::require(content.tensors.empty(), "an error comes without tensors");
        fuzz::require(content.error.size() > 10, "an error is a sentence");
        return 0;
    }
    std::vector<safetensors::Named> tensors;
    for (const auto& [name, entry] : content.tensors) {
        check_entry(entry, file);
        fuzz::require(content.find(name) == &entry, "find() finds it");
        if (fits_a_view(entry)) tensors.push_back({name, entry.view()});
    }
    const std::vector<std::byte> written = safetensors::serialize(tensors, content.metadata);
    const safetensors::Content again = safetensors::parse(written);
    fuzz::require(again.ok(), "what was written can be read:", again.error.c_str());
    fuzz::require(again.tensors.size() == tensors.size() && again.metadata == content.metadata, "nothing is lost");
    for (const safetensors::Named& tensor : tensors) {
        const safetensors::Entry *before = content.find(tensor.name), *after = again.find(tensor.name);
        fuzz::require(after && after->shape == before->shape && after->dtype == before->dtype &&
                          after->bytes.size() == before->bytes.size() &&
                          (after->bytes.empty() ||
                           std::memcmp(after->bytes.data(), before->bytes.data(), after->bytes.size()) == 0),
                      "the same tensor comes back:", tensor.name.c_str());
    }
    return 0;
}
