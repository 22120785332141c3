// The boundary: what is thrown inside becomes a Status.
#pragma once

#include <exception>
#include <new>
#include <utility>

#include "api/text.hpp"

namespace flashqla {

// NOTE: made when the library is loaded, so that running out of memory can be reported without memory.
extern const Status kOutOfMemory;

// Runs body() -> T, where T is made from a Status. Only the making of error sentences can throw in a run function.
template <class T, class Body>
T guarded(const char* function, Body&& body) noexcept {
    try {
        try {
            return std::forward<Body>(body)();
        } catch (const std::bad_alloc&) {
            return kOutOfMemory;
        } catch (const std::exception& error) {
            return Status(Code::internal, say(function, ": unexpected failure: ", error.what()));
        }
    } catch (...) {
        return kOutOfMemory;
    }
}

}  // namespace flashqla
