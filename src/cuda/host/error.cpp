#include "cuda/host/error.hpp"

#include <string>

namespace flashqla::cuda {
namespace {

const Status kNoSentence(Code::device_error,
                         "flashqla: CUDA reported an error, and there is no memory for a sentence about it");

}  // namespace

Status status_of(cudaError_t error, const char* function, const char* action, const char* object, int device) noexcept {
    if (error == cudaSuccess) return {};
    try {
        std::string text = std::string(function) + ": " + action + " " + object + " on cuda:" + std::to_string(device) +
                           " failed: " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")";
        return {Code::device_error, std::move(text)};
    } catch (...) {
        return kNoSentence;
    }
}

}  // namespace flashqla::cuda
