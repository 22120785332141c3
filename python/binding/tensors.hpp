// DLPack tensors as tvm-ffi hands them over -> views of the contract.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/optional.h>
#include <flashqla/flashqla.hpp>

#include <string>

namespace flashqla::python {

// NOTE: pointers to what tvm-ffi has, and not its TensorView, which is a copy of that for each argument.
using Tensor = DLTensor*;
using OptionalTensor = tvm::ffi::Optional<DLTensor*>;

// A dtype of this binding and of the oracle's room only: double.
inline constexpr DType kF64 = static_cast<DType>(64);

// Dtypes that a call takes beyond those of the contract.
enum class Extra {
    none,
    doubles,      // for the oracle
    bf16_as_u16,  // numpy has no bfloat16; its bits travel as uint16 (python/flash_qla/numpy_path.py)
};

// Writes the view of a tensor, or leaves it as it is when there is none. NOTE: in place, because a view that has just
// been written field by field is slow to copy: the processor waits until the fields are in the cache.
void read_view(TensorView& view, const char* name, Tensor tensor, Extra extra);
inline void read_view(TensorView& view, const char* name, const OptionalTensor& tensor, Extra extra) {
    if (tensor.has_value()) read_view(view, name, *tensor, extra);
}

template <class T>
TensorView view_of(const char* name, const T& tensor, Extra extra = Extra::none) {
    TensorView view;
    read_view(view, name, tensor, extra);
    return view;
}

// NOTE: made by hand and not with TVM_FFI_THROW, whose C++ backtrace would be printed below the sentence.
[[noreturn]] inline void raise(const char* python_type, const std::string& sentence) {
    throw tvm::ffi::Error(python_type, sentence, "");
}

// The exception of a Status: what a Python programmer expects, and what FLA raises in the same place.
void raise_if_bad(const Status& status);

}  // namespace flashqla::python
