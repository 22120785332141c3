// Any text as a case: one sentence, or a case whose canonical line is stable and that a plan can be asked about.
#include <string>

#include "cases/grammar.hpp"
#include "cases/instance.hpp"
#include "fuzz_input.hpp"

using namespace flashqla;

namespace {

void check_sentence(const std::string& error) {
    fuzz::require(error.size() > 10 && error.rfind("case: ", 0) == 0, "an error is a sentence:", error.c_str());
}

void check_line(const std::string& line) {
    const cases::Parsed<cases::Case> parsed = cases::parse_case(line);
    if (!parsed.ok()) return check_sentence(parsed.error);
    const std::string canonical = cases::to_line(parsed.value);
    const cases::Parsed<cases::Case> again = cases::parse_case(canonical);
    fuzz::require(again.ok(), "the canonical line is good:", (canonical + ": " + again.error).c_str());
    fuzz::require(again.value == parsed.value, "the canonical line means the same:", canonical.c_str());
    fuzz::require(cases::to_line(again.value) == canonical, "the canonical line is canonical:", canonical.c_str());

    const Result<Plan> plan = Plan::create(cases::problem_of(parsed.value), {}, cases::options_of(parsed.value));
    const Status status = plan.status();
    fuzz::require(status.ok() || (status.code() != Code::internal && status.message().size() > 20),
                  "a plan or a sentence:", status.message().c_str());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size > 400) return 0;
    const std::string text(reinterpret_cast<const char*>(data), size);
    check_line(text);
    const cases::Parsed<std::vector<std::string>> lines = cases::expand(text);
    if (!lines.ok()) {
        check_sentence(lines.error);
        return 0;
    }
    for (std::size_t i = 0; i < lines.value.size() && i < 20; ++i) check_line(lines.value[i]);
    return 0;
}
