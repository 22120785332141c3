// The documents against the tree: links lead somewhere, `path:name` is a name that stands in that file, and the
// README's example is the file that is compiled and run.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

namespace {

namespace fs = std::filesystem;
const fs::path kRoot = FQLA_SOURCE;

std::string read(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<fs::path> documents() {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(kRoot)) {
        if (entry.path().extension() == ".md") found.push_back(entry.path());
    }
    for (const char* folder : {"docs", "bench", "examples", "tests"}) {
        for (const auto& entry : fs::recursive_directory_iterator(kRoot / folder)) {
            if (entry.path().extension() == ".md") found.push_back(entry.path());
        }
    }
    std::sort(found.begin(), found.end());
    return found;
}

std::string name_of(const fs::path& document) { return fs::relative(document, kRoot).string(); }

// Without blocks of code, where brackets and backticks mean other things.
std::string prose_of(const fs::path& document) {
    std::ifstream file(document);
    std::string text;
    bool code = false;
    for (std::string line; std::getline(file, line);) {
        if (line.starts_with("```")) {
            code = !code;
        } else if (!code) {
            text += line + '\n';
        }
    }
    return text;
}

std::vector<std::smatch> matches(const std::string& text, const std::regex& pattern) {
    return {std::sregex_iterator(text.begin(), text.end(), pattern), {}};
}

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

bool has_word(const std::string& text, std::string_view word) {
    for (std::size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
        const bool begins = at == 0 || !is_word(text[at - 1]);
        const bool ends = at + word.size() == text.size() || !is_word(text[at + word.size()]);
        if (begins && ends) return true;
    }
    return false;
}

// The first block of code after ```LANGUAGE.
std::string first_block(const fs::path& document, const std::string& language) {
    const std::string text = read(document), fence = "```" + language + "\n";
    const std::size_t begin = text.find(fence);
    if (begin == std::string::npos) return {};
    const std::size_t end = text.find("```", begin + fence.size());
    return text.substr(begin + fence.size(), end - begin - fence.size());
}

TEST(Documents, LinksLeadSomewhere) {
    const std::regex link(R"(\]\(([^)#]+)(#[^)]*)?\))");
    for (const fs::path& document : documents()) {
        const std::string text = prose_of(document);
        for (const std::smatch& match : matches(text, link)) {
            const std::string target = match[1];
            if (target.find("://") != std::string::npos) continue;
            EXPECT_TRUE(fs::exists(document.parent_path() / target))
                << name_of(document) << " links to " << target << ", which does not exist";
        }
    }
}

TEST(Documents, NamedFilesExist) {
    const std::regex path(
        R"(`(?:\./)?((?:src|include|cli|tests|bench|examples|docs|cmake|scripts)/[\w./-]*)(?::[\w:]+)?`)");
    for (const fs::path& document : documents()) {
        const std::string text = prose_of(document);
        for (const std::smatch& match : matches(text, path)) {
            EXPECT_TRUE(fs::exists(kRoot / match[1].str()))
                << name_of(document) << " names " << match[1] << ", which does not exist";
        }
    }
}

TEST(Documents, NamesStandInTheirFiles) {
    const std::regex reference(R"(`([\w./-]+\.(?:hpp|cpp|h|txt|py)):([A-Za-z_][\w:]*)`)");
    std::size_t checked = 0;
    for (const fs::path& document : documents()) {
        const std::string text = prose_of(document);
        for (const std::smatch& match : matches(text, reference)) {
            const std::string file = match[1], name = match[2];
            const std::string content = read(kRoot / file);
            const std::regex part(R"(\w+)");
            for (const std::smatch& word : matches(name, part)) {
                EXPECT_TRUE(has_word(content, word.str()))
                    << name_of(document) << " says that " << word.str() << " is in " << file << "; it is not";
            }
            ++checked;
        }
    }
    EXPECT_GT(checked, 100u);
}

TEST(Documents, TheReadmesExampleIsTheCompiledFile) {
    EXPECT_EQ(first_block(kRoot / "README.md", "cpp"), read(kRoot / "examples/cpp/forward.cpp"));
}

}  // namespace
