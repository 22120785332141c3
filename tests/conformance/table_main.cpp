// Runs case tables as tests: every line is a test, on every SIMD target that this processor can execute.
//
//   conformance_tests [--backend NAME] [--one-target] [--random COUNT] [TABLE...] [GoogleTest options]
//
// --random adds seeded random cases (FQLA_TEST_SEED chooses others; a failure prints the line of its case).
// The oracle's answers are computed once, in this process. Then each target gets a child process of its own, because
// the library picks its target once in a process (FQLA_CPU_TARGET).
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "cases/grammar.hpp"
#include "cases/random_case.hpp"
#include "cases/runner.hpp"

namespace {

using namespace flashqla;

struct TableCase {
    cases::Case c;
    std::string where;
    std::shared_ptr<const cases::Oracle> oracle;
};

class LineTest : public testing::Test {
public:
    explicit LineTest(const TableCase& line) : line_(line) {}
    void TestBody() override {
        const cases::Report report = cases::check_case(line_.c, line_.oracle);
        if (report.verdict == cases::Verdict::passed) return;
        FAIL() << line_.where << "\n" << cases::text_of(report, false);
    }

private:
    const TableCase& line_;
};

// Letters of a line that GoogleTest's filters give a meaning are replaced.
std::string test_name(std::string line) {
    for (char& x : line) {
        if (x == ':' || x == '-' || x == '*' || x == '?') x = '_';
    }
    return line;
}

// SIMD targets of the cpu backend, from the line of system_info() that names them. Asked in a child process: the first
// question fixes the target of the process that asks.
std::vector<std::string> targets() {
    int ends[2];
    if (pipe(ends) != 0) return {};
    const pid_t child = fork();
    if (child == 0) {
        const std::string text = system_info();
        const ssize_t written = write(ends[1], text.data(), text.size());
        _exit(written == static_cast<ssize_t>(text.size()) ? 0 : 1);
    }
    close(ends[1]);
    std::string text;
    char buffer[4096];
    for (ssize_t n = 0; (n = read(ends[0], buffer, sizeof buffer)) > 0;)
        text.append(buffer, static_cast<std::size_t>(n));
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);

    // "backend cpu: SIMD target BEST of BEST,NEXT,LAST, up to ..."
    const std::string key = "SIMD target ";
    const std::size_t begin = text.find(" of ", std::min(text.find(key), text.size()));
    if (begin == std::string::npos) return {};
    std::string line = text.substr(begin + 4, text.find('\n', begin) - begin - 4);
    line.erase(std::min(line.find(", "), line.size()));
    for (char& x : line) {
        if (x == ',') x = ' ';
    }
    std::vector<std::string> names;
    std::istringstream words(line);
    for (std::string word; words >> word;) names.push_back(word);
    return names;
}

bool has_backend(const std::string& name) {
    std::string list = backend_names();
    for (char& x : list) {
        if (x == ',') x = ' ';
    }
    std::istringstream words(list);
    for (std::string word; words >> word;) {
        if (word == name) return true;
    }
    return false;
}

int run_tests() {
    std::fflush(stdout);
    return RUN_ALL_TESTS();
}

// RUN_ALL_TESTS in a child that has the target forced.
int run_target(const std::string& target) {
    std::printf("---- target %s\n", target.c_str());
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        setenv("FQLA_CPU_TARGET", target.c_str(), 1);
        const int result = run_tests();
        std::fflush(stdout);
        _exit(result);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) {
        std::printf("the process for target %s could not be started\n", target.c_str());
        return 1;
    }
    if (WIFSIGNALED(status)) {
        std::printf("target %s ended with signal %d\n", target.c_str(), WTERMSIG(status));
        return 1;
    }
    return WEXITSTATUS(status);
}

}  // namespace

int main(int argc, char** argv) {
    testing::GTEST_FLAG(brief) = true;  // thousands of tests: what passes is not worth a line
    testing::InitGoogleTest(&argc, argv);
    std::string backend = has_backend("cpu") ? "cpu" : "reference";
    bool one_target = std::getenv("FQLA_CPU_TARGET") != nullptr;
    std::vector<std::string> tables;
    long random_count = 0;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        if (argument == "--backend" && i + 1 < argc) {
            backend = argv[++i];
        } else if (argument == "--random" && i + 1 < argc) {
            random_count = std::atol(argv[++i]);
        } else if (argument == "--one-target") {
            one_target = true;
        } else {
            tables.push_back(argument);
        }
    }
    if (tables.empty() && random_count < 1) {
        std::fprintf(stderr, "usage: conformance_tests [--backend NAME] [--one-target] [--random COUNT] [TABLE...]\n");
        return 2;
    }
    std::vector<TableCase> lines;
    for (const std::string& path : tables) {
        const auto rows = cases::read_table(path);
        if (!rows.ok()) {
            std::fprintf(stderr, "%s\n", rows.error.c_str());
            return 2;
        }
        for (const cases::TableLine& row : rows.value) {
            const std::string where = path + ":" + std::to_string(row.number);
            cases::Parsed<cases::Case> c = cases::parse_case(row.text);
            if (!c.ok()) {
                std::fprintf(stderr, "%s: %s\n", where.c_str(), c.error.c_str());
                return 2;
            }
            if (c.value.backend.empty()) c.value.backend = backend;
            lines.push_back({c.value, where, nullptr});
        }
    }
    const char* seed_text = std::getenv("FQLA_TEST_SEED");
    const std::uint64_t first = seed_text ? std::strtoull(seed_text, nullptr, 10) : 1;
    for (long i = 0; i < random_count; ++i) {
        const std::uint64_t seed = first + static_cast<std::uint64_t>(i);
        lines.push_back({cases::random_case(seed), "random case " + std::to_string(seed), nullptr});
        lines.back().c.backend = backend;
    }
    // A line may stand in two tables, and two lines may mean the same case.
    std::map<std::string, int> seen;
    for (TableCase& line : lines) {
        if (line.c.expect == cases::Expect::ok) line.oracle = cases::ask_oracle(line.c);
        std::string name = test_name(cases::to_line(line.c));
        if (const int count = seen[name]++; count > 0) name += "#" + std::to_string(count + 1);
        testing::RegisterTest("table", name.c_str(), nullptr, nullptr, __FILE__, __LINE__,
                              [&line]() -> testing::Test* { return new LineTest(line); });
    }
    std::printf("%zu cases, backend %s\n", lines.size(), backend.c_str());
    const std::vector<std::string> names = targets();
    if (one_target || names.empty() || testing::GTEST_FLAG(list_tests)) return run_tests();
    int worst = 0;
    for (const std::string& name : names) worst = std::max(worst, run_target(name));
    return worst;
}
