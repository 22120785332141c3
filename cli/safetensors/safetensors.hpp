// The safetensors file format: 8 bytes of header length (little endian), a JSON header, tensor bytes. Read and write.
// Hostile files end in one sentence, never in an access out of bounds or a huge allocation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "flashqla/flashqla.hpp"

namespace flashqla::safetensors {

inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit

struct Entry {
    DType dtype = DType::none;  // none: a type that the library has no use for, see dtype_name
    std::string dtype_name;     // as the file spells it: "F32", "BF16", "F8_E4M3", ...
    std::vector<std::int64_t> shape;
    std::span<const std::byte> bytes;  // into the parsed buffer

    std::int64_t elements() const noexcept;
    // A contiguous view; rank must be at most kMaxRank and data must be aligned for dtype (see File).
    TensorView view() const noexcept;
};

struct Content {
    std::map<std::string, Entry> tensors;
    std::map<std::string, std::string> metadata;
    std::string error;  // empty: good; otherwise one sentence and no tensors
    bool ok() const noexcept { return error.empty(); }
    const Entry* find(const std::string& name) const;
};

// Checks everything; the entries point into `buffer`, which must outlive them.
Content parse(std::span<const std::byte> buffer);

// A file and its content. Every tensor is aligned to its element size (moved, where the file has it otherwise).
struct File {
    std::shared_ptr<std::vector<std::byte>> buffer;
    std::vector<std::shared_ptr<std::vector<std::byte>>> moved;
    Content content;
};
File read(const std::string& path);

// Returns an empty string or one sentence. Tensors may have any strides; the file has them contiguous.
struct Named {
    std::string name;
    TensorView view;
};
std::string write(const std::string& path, const std::vector<Named>& tensors,
                  const std::map<std::string, std::string>& metadata = {});
// The bytes that write() puts into the file.
std::vector<std::byte> serialize(const std::vector<Named>& tensors,
                                 const std::map<std::string, std::string>& metadata = {});

}  // namespace flashqla::safetensors
