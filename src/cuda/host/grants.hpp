// More than 48 KiB of dynamic shared memory takes a permission, which a kernel has for each GPU. Asking for it takes
// the host a microsecond, so what was granted is remembered, and a launch looks it up without a lock.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace flashqla::cuda {

class SharedMemoryGrants {
public:
    static constexpr std::size_t kWithoutAsking = 48 << 10;

    struct Outcome {
        int error = 0;
        bool of_asking = false;
    };

    // launch(), after ask(bytes) unless so many bytes are known to be granted. Both return an error, 0 if there is
    // none. `refused`: what launch() returns where there is no such grant, as after a reset of the device; then it is
    // asked for again, once.
    template <class Ask, class Launch>
    Outcome launch(const void* kernel, int device, std::size_t bytes, int refused, Ask&& ask,
                   Launch&& launch) noexcept {
        if (bytes <= kWithoutAsking) return {launch(), false};
        if (bytes > granted(kernel, device)) {
            if (const int error = grant(kernel, device, bytes, false, ask); error != 0) return {error, true};
        }
        if (const int error = launch(); error != refused) return {error, false};
        if (const int error = grant(kernel, device, bytes, true, ask); error != 0) return {error, true};
        return {launch(), false};
    }

    // Bytes that are known to be granted.
    std::size_t granted(const void* kernel, int device) const noexcept {
        const Place place = find(kernel, device);
        return place.taken ? place.entry->bytes.load(std::memory_order_acquire) : 0;
    }

private:
    // Written under the lock, and never given to another kernel.
    struct Entry {
        std::atomic<const void*> kernel{nullptr};  // what it says of the device is there once this is
        int device = 0;
        std::atomic<std::size_t> bytes{0};
    };
    static constexpr std::size_t kEntries = 2048, kProbes = 16;

    // The entry of a kernel and a device, or a free one for it. Null: there is no room, and its grants are not
    // remembered.
    struct Place {
        const Entry* entry = nullptr;
        bool taken = false;  // NOTE: as seen here; a free one may be another's by now, but for who has the lock
    };

    Place find(const void* kernel, int device) const noexcept {
        // NOTE: functions lie at multiples of 16.
        auto hash = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(kernel) / 16);
        hash = (hash + static_cast<std::uint64_t>(device) * 0x1000000) * 0x9e3779b97f4a7c15u;
        for (std::size_t i = 0; i < kProbes; ++i) {
            const Entry& entry = entries_[(static_cast<std::size_t>(hash >> 40) + i) % kEntries];
            const void* const owner = entry.kernel.load(std::memory_order_acquire);
            if (!owner) return {&entry, false};
            if (owner == kernel && entry.device == device) return {&entry, true};
        }
        return {};
    }

    // NOTE: never for less than was granted before, which another thread may be about to use.
    template <class Ask>
    int grant(const void* kernel, int device, std::size_t bytes, bool again, Ask&& ask) noexcept {
        const std::lock_guard lock(mutex_);
        const Place place = find(kernel, device);
        const std::size_t before = place.taken ? place.entry->bytes.load(std::memory_order_relaxed) : 0;
        if (bytes <= before && !again) return 0;
        bytes = std::max(bytes, before);
        if (const int error = ask(bytes); error != 0 || !place.entry) return error;
        Entry& entry = entries_[static_cast<std::size_t>(place.entry - entries_.data())];
        entry.bytes.store(bytes, std::memory_order_release);
        if (!place.taken) {
            entry.device = device;
            entry.kernel.store(kernel, std::memory_order_release);
        }
        return 0;
    }

    std::mutex mutex_;
    std::array<Entry, kEntries> entries_;
};

}  // namespace flashqla::cuda
