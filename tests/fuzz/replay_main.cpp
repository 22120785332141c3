// Runs a fuzz target without libFuzzer: over the files and folders named, then over seeded random inputs.
//
//   fuzz_NAME [--random COUNT] [FILE|FOLDER...]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "fuzz_input.hpp"

namespace {

namespace fs = std::filesystem;

std::vector<fs::path> files_of(const fs::path& path) {
    if (!fs::is_directory(path)) return {path};
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(path)) {
        if (entry.is_regular_file()) files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    return files;
}

// An exact allocation, so that a sanitizer sees a read past the end of the input.
void run(const std::vector<char>& content) {
    std::vector<std::uint8_t> bytes(content.begin(), content.end());
    bytes.shrink_to_fit();
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
}

}  // namespace

int main(int argc, char** argv) {
    long random_count = 0, count = 0;
    std::vector<std::vector<char>> corpus;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        if (argument == "--random" && i + 1 < argc) {
            random_count = std::atol(argv[++i]);
            continue;
        }
        for (const fs::path& path : files_of(argument)) {
            std::ifstream file(path, std::ios::binary);
            if (!file) {
                std::fprintf(stderr, "%s cannot be read\n", path.c_str());
                return 2;
            }
            corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
            run(corpus.back());
            ++count;
        }
    }
    // Half of them are corpus files with a few bytes changed: those get further than noise.
    std::mt19937_64 dice(1);
    for (long i = 0; i < random_count; ++i, ++count) {
        std::vector<char> bytes;
        if (!corpus.empty() && dice() % 2 == 0) {
            bytes = corpus[dice() % corpus.size()];
            for (auto change = dice() % 8 + 1; change > 0 && !bytes.empty(); --change) {
                bytes[dice() % bytes.size()] = static_cast<char>(dice());
            }
        } else {
            bytes.resize(dice() % 300);
            for (char& x : bytes) x = static_cast<char>(dice());
        }
        run(bytes);
    }
    std::printf("%ld inputs, every one ended in a result or a clear error\n", count);
    return count > 0 ? 0 : 1;
}
