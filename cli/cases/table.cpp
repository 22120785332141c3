#include <fstream>

#include "cases/grammar.hpp"

namespace flashqla::cases {

Parsed<std::vector<TableLine>> read_table(const std::string& path) {
    Parsed<std::vector<TableLine>> result;
    std::ifstream file(path);
    if (!file) {
        result.error = "table: '" + path + "' cannot be opened; a readable text file is needed";
        return result;
    }
    std::string text;
    for (int number = 1; std::getline(file, text); ++number) {
        text.erase(std::min(text.find('#'), text.size()));
        const std::size_t begin = text.find_first_not_of(" \t\r");
        if (begin == std::string::npos) continue;
        const std::size_t end = text.find_last_not_of(" \t\r");
        const Parsed<std::vector<std::string>> lines = expand(std::string_view(text).substr(begin, end - begin + 1));
        if (!lines.ok()) {
            result.error = path + ":" + std::to_string(number) + ": " + lines.error;
            return result;
        }
        for (const std::string& line : lines.value) result.value.push_back({line, number});
    }
    return result;
}

}  // namespace flashqla::cases
