// Scratch memory booked by name at plan time and resolved to pointers at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace flashqla {

inline constexpr std::size_t kWorkspaceAlignment = 64;

// The next multiple of the alignment.
inline constexpr std::size_t aligned_size(std::size_t bytes) {
    return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

template <class T>
struct Booking {
    std::size_t offset = 0;
    std::size_t count = 0;
    T* in(std::byte* workspace) const noexcept { return reinterpret_cast<T*>(workspace + offset); }
};

class WorkspaceLayout {
public:
    template <class T>
    Booking<T> book(std::string name, std::size_t count) {
        return {reserve(std::move(name), count * sizeof(T)), count};
    }

    std::size_t bytes() const noexcept { return bytes_; }
    std::string map() const;  // one line a booking: offset, bytes, name

private:
    struct Entry {
        std::string name;
        std::size_t offset, bytes;
    };
    std::size_t reserve(std::string name, std::size_t bytes);

    std::vector<Entry> entries_;
    std::size_t bytes_ = 0;
};

}  // namespace flashqla
