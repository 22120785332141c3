// Times the model on this machine and prints a table.
#pragma once

#include <string>
#include <string_view>

#include "model.hpp"

namespace qwen3_next {

// Reads up to 4096 bytes of `text`.
void bench(const Model& model, std::string_view text, const std::string& backend);

}  // namespace qwen3_next
