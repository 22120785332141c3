// The vocabulary of the case grammar: one row for each item a line may have.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cases/case.hpp"

namespace flashqla::cases {

// One kind of item. `size` items are a name with a number right behind it (hk16), `flag` items are a word, `value`
// items are name=value. read returns false when the value is not allowed; print returns "" for the default.
struct Item {
    enum class Style { size, flag, value } style;
    const char* name;
    const char* allowed;
    const char* meaning;
    std::function<bool(Case&, std::string_view)> read;
    std::function<std::string(const Case&)> print;
};

// Every item, in the order of the canonical line.
const std::vector<Item>& items();

bool read_number(std::string_view text, std::int64_t& x);
std::vector<std::string_view> split(std::string_view text, char separator);

}  // namespace flashqla::cases
