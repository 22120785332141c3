// DLPack tensors as tvm-ffi hands them over -> views of the contract.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/optional.h>
#include <flashqla/flashqla.hpp>

#include <string>

namespace flashqla::python {

using Tensor = tvm::ffi::TensorView;
using OptionalTensor = tvm::ffi::Optional<tvm::ffi::TensorView>;

// A dtype of this binding and of the oracle's room only: double.
inline constexpr DType kF64 = static_cast<DType>(64);

// Dtypes that a call takes beyond those of the contract.
enum class Extra {
    none,
    doubles,      // for the oracle
    bf16_as_u16,  // numpy has no bfloat16; its bits travel as uint16 (python/flash_qla/numpy_path.py)
};

TensorView view_of(const char* name, const Tensor& tensor, Extra extra = Extra::none);
inline TensorView view_of(const char* name, const OptionalTensor& tensor, Extra extra = Extra::none) {
    return tensor.has_value() ? view_of(name, *tensor, extra) : TensorView{};
}

// NOTE: made by hand and not with TVM_FFI_THROW, whose C++ backtrace would be printed below the sentence.
[[noreturn]] inline void raise(const char* python_type, const std::string& sentence) {
    throw tvm::ffi::Error(python_type, sentence, "");
}

// The exception of a Status: what a Python programmer expects, and what FLA raises in the same place.
void raise_if_bad(const Status& status);

}  // namespace flashqla::python
