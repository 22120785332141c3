#include "tensors.hpp"

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
    raise("TypeError", std::string("flash_qla: ") + name + " has a dtype (DLPack code " + std::to_string(code) + ", " +
                           std::to_string(bits) + " bits, " + std::to_string(int{dtype.lanes}) +
                           " lanes) that no function takes; allowed are float32, float16, bfloat16, and int32, int64 "
                           "and bool for indices and flags");
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

TensorView view_of(const char* name, const Tensor& tensor, Extra extra) {
    const int rank = tensor.ndim();
    if (rank > kMaxRank) {
        raise("ValueError", std::string("flash_qla: ") + name + " has " + std::to_string(rank) +
                                " dimensions; no tensor of a call has more than " + std::to_string(kMaxRank));
    }
    TensorView view;
    view.dtype = dtype_of(name, tensor.dtype(), extra);
    view.rank = rank;
    view.device = {device_type_of(name, tensor.device().device_type), tensor.device().device_id};
    if (view.device.type == DeviceType::cpu) view.device.index = 0;
    view.data = static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset();
    const auto strides = tensor.strides();
    for (int i = 0; i < rank; ++i) {
        view.shape[i] = tensor.size(i);
        view.stride[i] = strides[i];
    }
    return view;
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
