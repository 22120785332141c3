#include "base/workspace.hpp"

#include <utility>

namespace flashqla {

std::size_t WorkspaceLayout::reserve(std::string name, std::size_t bytes) {
    const std::size_t offset = bytes_;
    const std::size_t rounded = aligned_size(bytes);
    entries_.push_back({std::move(name), offset, rounded});
    bytes_ += rounded;
    return offset;
}

std::string WorkspaceLayout::map() const {
    std::string text;
    for (const Entry& entry : entries_) {
        if (!text.empty()) text += '\n';
        text += std::to_string(entry.offset) + " + " + std::to_string(entry.bytes) + "  " + entry.name;
    }
    return text;
}

}  // namespace flashqla
