#include "tensors.hpp"

#include <algorithm>

namespace flashqla::python {
namespace {

DType dtype_of(const char* name, DLDataType dtype, Extra extra) {
    const int code = dtype.code, bits = dtype.bits;
    if (dtype.lanes == 1) {
        if (code == kDLFloat && bits == 32) return DType::f32;
        if (code == kDLFloat && bits == 16) return DType::f16;
        if (code == kDLFloat && bits == 64 && extra == Extra::doubles) return kF64;
        if (code == kDLBfloat && bits == 16) return DType::bf16;
        if (code == kDLUInt && bits == 16 && extra == Extra::bf16_as_u16) return DType::bf16;
        if (code == kDLInt && bits == 32) return DType::i32;
        if (code == kDLInt && bits == 64) return DType::i64;
        if ((code == kDLUInt || code == kDLBool) && bits == 8) return DType::u8;
    }
    static const char* const kKinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
    const std::string kind = code < 7 ? kKinds[code] : "DLPack code " + std::to_string(code) + " of bits ";
    raise("TypeError",
          std::string("flash_qla: ") + name + " is " + kind + std::to_string(bits) +
              "; allowed are float32, float16 and bfloat16, and int32, int64 and bool for indices and flags");
}

DeviceType device_type_of(const char* name, DLDeviceType type) {
    switch (type) {
        case kDLCPU:
        case kDLCUDAHost: return DeviceType::cpu;
        case kDLCUDA:
        case kDLCUDAManaged: return DeviceType::cuda;
        default:
            raise("ValueError", std::string("flash_qla: ") + name + " is on a device of DLPack type " +
                                    std::to_string(static_cast<int>(type)) +
                                    "; tensors must be on a CPU or CUDA device");
    }
}

}  // namespace

void read_view(TensorView& view, const char* name, Tensor tensor, Extra extra) {
    const int rank = tensor->ndim;
    if (rank > kMaxRank) {
        raise("ValueError", std::string("flash_qla: ") + name + " has " + std::to_string(rank) +
                                " dimensions; no tensor of a call has more than " + std::to_string(kMaxRank));
    }
    view.dtype = dtype_of(name, tensor->dtype, extra);
    view.rank = rank;
    view.device = {device_type_of(name, tensor->device.device_type), tensor->device.device_id};
    if (view.device.type == DeviceType::cpu) view.device.index = 0;
    view.data = static_cast<char*>(tensor->data) + tensor->byte_offset;
    bool dense = tensor->strides == nullptr;
    for (int i = 0; i < rank; ++i) {
        view.shape[i] = tensor->shape[i];
        if (tensor->strides) view.stride[i] = tensor->strides[i];
        dense = dense || view.shape[i] == 0;  // numpy gives an empty array strides of 0
    }
    std::int64_t stride = 1;
    for (int i = rank - 1; dense && i >= 0; --i) {
        view.stride[i] = stride;
        stride *= std::max<std::int64_t>(view.shape[i], 1);
    }
}

void raise_if_bad(const Status& status) {
    switch (status.code()) {
        case Code::ok: return;
        case Code::invalid_argument: raise("ValueError", status.message());
        case Code::unsupported: raise("NotImplementedError", status.message());
        case Code::out_of_memory: raise("MemoryError", status.message());
        default: raise("RuntimeError", status.message());
    }
}

}  // namespace flashqla::python
