// What a person sees on a terminal and a pipe does not.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace flashqla::cli {

// One line on stderr that is rewritten in place. Does nothing when stderr is no terminal.
class Progress {
public:
    Progress(std::string what, std::size_t total);
    ~Progress();
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;
    void show(std::size_t done, const std::string& label);
    void clear();  // before anything else is printed

private:
    std::string what_;
    std::size_t total_;
    bool active_, visible_ = false;
    double last_ = 0;
};

// Columns padded to their widest entry; the first is left-aligned, the others right-aligned.
std::string table(const std::vector<std::vector<std::string>>& rows);

double seconds();  // a monotonic clock
std::string date_today();
std::string format(const char* pattern, double x);

}  // namespace flashqla::cli
