// Sentences for errors and explain(). These allocate, so they are built only when something is to be said.
#pragma once

#include <sstream>
#include <string>

#include "base/backend.hpp"

namespace flashqla {

template <class... Parts>
std::string say(const Parts&... parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

inline const char* name_of(Pass pass) noexcept {
    switch (pass) {
        case Pass::forward: return "forward";
        case Pass::backward: return "backward";
        case Pass::decode: return "decode";
    }
    return "unknown";
}

inline std::string name_of(Device device) {
    switch (device.type) {
        case DeviceType::cpu: return say("cpu:", device.index);
        case DeviceType::cuda: return say("cuda:", device.index);
    }
    return say("unknown device type ", static_cast<std::int32_t>(device.type));
}

inline std::string dtype_text(DType dtype) {
    if (size_of(dtype) > 0) return name_of(dtype);
    return dtype == DType::none ? "none" : say("number ", static_cast<std::int32_t>(dtype), " (not a dtype)");
}

}  // namespace flashqla
