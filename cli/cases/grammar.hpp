// The text form of a case: parse, print, sweeps and tables.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cases/case.hpp"

namespace flashqla::cases {

// A value or one sentence.
template <class T>
struct Parsed {
    T value{};
    std::string error;  // empty: value is good
    bool ok() const noexcept { return error.empty(); }
};

// `fwd:b1,t64,hk1,hv1,k128,v128,f32,gate=log`. An error names the position, what was found and what is allowed.
Parsed<Case> parse_case(std::string_view line);

// The canonical line: parse_case(to_line(c)) == c. Sizes, dtype and gate always; the rest where it is not the default.
std::string to_line(const Case& c);

// {a|b|c} and {1..200}, {1..200:7} stand for one case each; t=1..200 is short for t{1..200}. All combinations.
Parsed<std::vector<std::string>> expand(std::string_view line);

// Lines of a table: one case (or sweep) a line, '#' starts a comment, blank lines are skipped.
struct TableLine {
    std::string text;
    int number = 0;
};
Parsed<std::vector<TableLine>> read_table(const std::string& path);

// The grammar as text, for --help and docs/cli.md.
std::string grammar_help();

}  // namespace flashqla::cases
