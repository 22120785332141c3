#include <cstdio>

#include "commands.hpp"

namespace flashqla::cli {

Command add_info(CLI::App&) {
    return [] {
        const std::string text = system_info();
        std::fputs(text.c_str(), stdout);
        if (!text.empty() && text.back() != '\n') std::fputc('\n', stdout);
        return kOk;
    };
}

}  // namespace flashqla::cli
