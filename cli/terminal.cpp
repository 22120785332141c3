#include "terminal.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>

namespace flashqla::cli {

Progress::Progress(std::string what, std::size_t total)
    : what_(std::move(what)), total_(total), active_(total > 1 && isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() { clear(); }

void Progress::show(std::size_t done, const std::string& label) {
    if (!active_) return;
    const double now = seconds();
    if (visible_ && now - last_ < 0.05) return;
    last_ = now;
    constexpr std::size_t kWidth = 24;
    const std::size_t filled = total_ ? std::min(kWidth, done * kWidth / total_) : kWidth;
    std::string bar(filled, '#');
    bar.resize(kWidth, '.');
    std::fprintf(stderr, "\r\033[K%s [%s] %zu/%zu %s", what_.c_str(), bar.c_str(), done, total_,
                 label.substr(0, 60).c_str());
    std::fflush(stderr);
    visible_ = true;
}

void Progress::clear() {
    if (!visible_) return;
    std::fputs("\r\033[K", stderr);
    std::fflush(stderr);
    visible_ = false;
}

std::string table(const std::vector<std::vector<std::string>>& rows) {
    std::vector<std::size_t> widths;
    for (const auto& row : rows) {
        widths.resize(std::max(widths.size(), row.size()));
        for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    }
    std::string text;
    for (const auto& row : rows) {
        std::string line;
        for (std::size_t i = 0; i < row.size(); ++i) {
            const std::string space(widths[i] - row[i].size(), ' ');
            line += i == 0 ? row[i] + space : "  " + space + row[i];
        }
        text += line + "\n";
    }
    return text;
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::string date_today() {
    const std::time_t now = std::time(nullptr);
    std::tm utc{};
    gmtime_r(&now, &utc);
    char text[32];
    std::strftime(text, sizeof text, "%Y-%m-%d", &utc);
    return text;
}

std::string format(const char* pattern, double x) {
    char text[64];
    std::snprintf(text, sizeof text, pattern, x);
    return text;
}

}  // namespace flashqla::cli
