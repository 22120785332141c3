// What plans and the library say about themselves.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/tvm_ffi.h>

#include "plans.hpp"

namespace flashqla::python {
namespace {

using tvm::ffi::Any;
using tvm::ffi::Array;
using tvm::ffi::String;

// [explanation, backends of forward, backward, decode, workspace bytes of forward, backward, decode, checkpoint rows]
Array<Any> plan_text(std::int64_t batch, std::int64_t tokens, std::int64_t sequences, std::int64_t heads_k,
                     std::int64_t heads_v, std::int64_t dim_k, std::int64_t dim_v, String io, String out,
                     std::int64_t device_type, std::int64_t device_index, std::int64_t modes, double scale,
                     std::int64_t checkpoint_every, std::int64_t decode_rows, String backend, std::int64_t threads,
                     std::int64_t context_split) {
    const auto dtype = [](const char* name, const String& text) {
        for (const DType candidate : {DType::none, DType::f32, DType::f16, DType::bf16}) {
            if (text == (candidate == DType::none ? "" : name_of(candidate))) return candidate;
        }
        raise("ValueError", std::string("flash_qla.plan: ") + name + " is '" + std::string(text) +
                                "'; allowed are f32, f16 and bf16");
    };
    // Only shapes matter here: views without memory.
    const std::int64_t modes_of_call = modes;
    TensorView q, v, cu_seqlens;
    q.dtype = v.dtype = dtype("dtype", io);
    q.rank = v.rank = 4;
    q.shape = {batch, tokens, heads_k, dim_k};
    v.shape = {batch, tokens, heads_v, dim_v};
    if (sequences > 0) {
        cu_seqlens.dtype = DType::i64;
        cu_seqlens.rank = 1;
        cu_seqlens.shape = {sequences + 1};
    }
    Settings settings;
    settings.modes = modes_of_call;
    settings.scale = scale;
    settings.checkpoint_every = checkpoint_every;
    settings.decode_rows = decode_rows;
    settings.backend = std::string(backend);
    settings.threads = threads;
    settings.context_split = context_split;
    const Device device{static_cast<DeviceType>(device_type), static_cast<std::int32_t>(device_index)};
    const Plan plan =
        cached_plan(problem_of(q, v, cu_seqlens, dtype("output_dtype", out), settings), device, options_of(settings));
    Array<Any> answer;
    answer.push_back(String(plan.explain()));
    for (const Pass pass : {Pass::forward, Pass::backward, Pass::decode}) {
        answer.push_back(String(std::string(plan.backend(pass))));
    }
    for (const Pass pass : {Pass::forward, Pass::backward, Pass::decode}) {
        answer.push_back(static_cast<std::int64_t>(plan.workspace_bytes(pass)));
    }
    answer.push_back(plan.checkpoint_rows());
    return answer;
}

String info_text() {
    const CacheCounts counts = cache_counts();
    return system_info() + "cuda in this package: " FQLA_PYTHON_CUDA "\nplans kept: " + std::to_string(counts.kept) +
           "\nplans made: " + std::to_string(counts.made) + "\nplans found: " + std::to_string(counts.found) + "\n";
}

String version_text() { return version(); }

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, plan_text)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(info, info_text)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(version, version_text)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(after_fork, [] { after_fork(); })

}  // namespace
}  // namespace flashqla::python
