// The case table for flash_qla.testing: lines, inputs, the oracle's outputs, tolerances, and the check that
// `flashqla check` makes.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/tvm_ffi.h>

#include "cases/grammar.hpp"
#include "cases/runner.hpp"
#include "tensors.hpp"

namespace flashqla::python {
namespace {

using tvm::ffi::Any;
using tvm::ffi::Array;
using tvm::ffi::Bytes;
using tvm::ffi::String;

template <class T>
T value_of(cases::Parsed<T> parsed) {
    if (!parsed.ok()) raise("ValueError", "flash_qla.testing: " + parsed.error);
    return std::move(parsed.value);
}

cases::Case case_of(const String& line) { return value_of(cases::parse_case(std::string(line))); }

Array<String> lines_of_table(String path) {
    Array<String> lines;
    for (const cases::TableLine& line : value_of(cases::read_table(std::string(path)))) lines.push_back(line.text);
    return lines;
}

Array<String> lines_of_sweep(String sweep) {
    Array<String> lines;
    for (const std::string& line : value_of(cases::expand(std::string(sweep)))) lines.push_back(line);
    return lines;
}

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
    return Bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// Logical values, dense: float32 holds every element of a float tensor, int64 of an integer one.
Bytes dense(const cases::HostTensor& tensor) {
    const TensorView& view = tensor.view;
    if (view.dtype == DType::f32 || view.dtype == DType::f16 || view.dtype == DType::bf16) {
        return bytes_of(cases::values_of(tensor));
    }
    std::vector<std::int64_t> values;
    cases::for_each(view, [&](const std::int64_t*, std::int64_t offset) {
        switch (view.dtype) {
            case DType::i32: values.push_back(static_cast<const std::int32_t*>(view.data)[offset]); break;
            case DType::i64: values.push_back(static_cast<const std::int64_t*>(view.data)[offset]); break;
            default: values.push_back(static_cast<const std::uint8_t*>(view.data)[offset]); break;
        }
    });
    return bytes_of(values);
}

Array<std::int64_t> shape_of(const TensorView& view) {
    Array<std::int64_t> shape;
    for (int i = 0; i < view.rank; ++i) shape.push_back(view.shape[i]);
    return shape;
}

// [canonical line, pass, options, [name, dtype, shape, is output, has a start, bytes] of each tensor]
Array<Any> make_case(String line) {
    const cases::Case c = case_of(line);
    const cases::Instance instance = cases::make_instance(c);
    const Problem& p = instance.problem;
    const Array<Any> options{static_cast<std::int64_t>(p.gate),
                             static_cast<std::int64_t>(p.beta_mode),
                             static_cast<double>(p.beta_factor),
                             p.qk_l2norm,
                             static_cast<double>(p.scale),
                             static_cast<std::int64_t>(p.grouping),
                             static_cast<std::int64_t>(p.state_layout),
                             static_cast<std::int64_t>(p.pad_rule),
                             static_cast<std::int64_t>(p.checkpoints),
                             p.checkpoint_every,
                             p.decode_rows,
                             instance.decode.commit_state,
                             instance.with_commit};
    // States in place are one tensor that is both read and written. Where a forward pass starts from it, it is here a
    // second time as initial_state, as the passes out of place have it.
    const bool in_place = c.pass == Pass::decode || c.pool > 0 || c.in_place;
    const void* const start = c.pass == Pass::forward ? instance.forward.initial_state.data : nullptr;
    Array<Any> tensors;
    const auto add = [&](const char* name, const cases::HostTensor& tensor, bool is_output, bool has_start) {
        tensors.push_back(Array<Any>{String(name), String(name_of(tensor.view.dtype)), shape_of(tensor.view), is_output,
                                     has_start, dense(tensor)});
    };
    for (const cases::HostTensor& tensor : instance.tensors) {
        const bool is_output = instance.is_output(tensor.name);
        const bool is_state = tensor.name == "state" || tensor.name == "final_state";
        const bool both = start != nullptr && tensor.view.data == start;
        if (both) add("initial_state", tensor, false, true);
        if (!both || is_output) add(tensor.name.c_str(), tensor, is_output, !is_output || (is_state && in_place));
    }
    const char* const pass[] = {"forward", "backward", "decode"};
    return {String(cases::to_line(c)), String(pass[static_cast<int>(c.pass)]), options, tensors};
}

// [name, bytes] of each output, float32
Array<Any> oracle_of_case(String line) {
    const auto oracle = cases::ask_oracle(case_of(line));
    raise_if_bad(oracle->status);
    Array<Any> outputs;
    for (const auto& [name, reference] : oracle->outputs) {
        outputs.push_back(Array<Any>{String(name), bytes_of(reference.values)});
    }
    return outputs;
}

// [relative L2 of a head, of the whole, floor, absolute]
Array<double> tolerance_of(String line, String output, String stored, std::int64_t head_elements, bool on_gpu) {
    DType dtype = DType::f32;
    for (const DType candidate : {DType::f32, DType::f16, DType::bf16}) {
        if (stored == name_of(candidate)) dtype = candidate;
    }
    cases::Case c = case_of(line);
    if (on_gpu) c.device = {DeviceType::cuda, 0};
    const cases::Tolerance t = cases::tolerance(c, std::string(output), dtype, head_elements);
    return {t.per_head, t.whole, t.floor, t.absolute};
}

// [verdict, text for a person]
Array<String> check_of_case(String line, bool verbose) {
    const cases::Report report = cases::check_case(case_of(line));
    const char* const verdict[] = {"passed", "failed", "unsupported"};
    return {String(verdict[static_cast<int>(report.verdict)]), String(cases::text_of(report, verbose))};
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(case_table, lines_of_table)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(case_expand, lines_of_sweep)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(case_make, make_case)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(case_oracle, oracle_of_case)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(case_tolerance, tolerance_of)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(case_check, check_of_case)

}  // namespace
}  // namespace flashqla::python
