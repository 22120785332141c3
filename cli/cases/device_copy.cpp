#include "cases/device_copy.hpp"

#include <algorithm>
#include <cstdint>
#include <string>

#include "cases/device_memory.hpp"
#include "cases/numbers.hpp"

namespace flashqla::cases {
namespace {

constexpr std::int64_t kDrawnRows = 256;  // of a long case

struct Block {
    const Storage* host;
    std::byte* gpu;
};

template <class F>
void each_input(auto& args, F&& f) {
    for (TensorView* view :
         {&args.q, &args.k, &args.v, &args.g, &args.beta, &args.A_log, &args.dt_bias, &args.cu_seqlens})
        f(*view);
}

template <class F>
void each_argument(Instance& x, F&& f) {
    each_input(x.forward, f);
    each_input(x.backward, f);
    each_input(x.decode, f);
    ForwardArgs& fwd = x.forward;
    for (TensorView* view : {&fwd.initial_state, &fwd.final_state, &fwd.state_indices, &fwd.state_indices_out,
                             &fwd.has_initial_state, &fwd.checkpoints, &fwd.checkpoint_list, &fwd.o})
        f(*view);
    BackwardArgs& bwd = x.backward;
    for (TensorView* view : {&bwd.initial_state, &bwd.d_o, &bwd.d_final_state, &bwd.d_q, &bwd.d_k, &bwd.d_v, &bwd.d_g,
                             &bwd.d_beta, &bwd.d_A_log, &bwd.d_dt_bias, &bwd.d_initial_state})
        f(*view);
    DecodeArgs& dec = x.decode;
    for (TensorView* view :
         {&dec.state, &dec.state_indices, &dec.state_indices_out, &dec.has_initial_state, &dec.num_accepted,
          &dec.intermediate_states, &dec.intermediate_indices, &dec.parent_tokens, &dec.o})
        f(*view);
    CommitArgs& com = x.commit;
    for (TensorView* view :
         {&com.state, &com.state_indices, &com.intermediate_states, &com.intermediate_indices, &com.accepted})
        f(*view);
}

// NOTE: strides with gaps and checkpoints stay as they are; such cases are short.
bool is_long(const Case& c) {
    return c.pass != Pass::decode && !c.strided && c.checkpoints == Checkpoints::none &&
           c.batch * c.tokens > 2 * kDrawnRows;
}

// The same batch and sequences with fewer tokens, none of them padding, which is poisoned.
Case shortened(Case c) {
    const std::int64_t tokens = std::max<std::int64_t>(kDrawnRows / c.batch, 1);
    std::int64_t rest = tokens;
    for (std::int64_t& length : c.lens) rest -= length = length * tokens / c.tokens;
    if (c.packed()) c.lens.front() += rest;
    c.tokens = tokens;
    return c;
}

bool by_token(const HostTensor& tensor) {
    static const std::string kNames[] = {"q", "k", "v", "g", "beta", "o", "d_o", "d_q", "d_k", "d_v", "d_g", "d_beta"};
    return std::find(std::begin(kNames), std::end(kNames), tensor.name) != std::end(kNames);
}

std::int64_t bytes_of(const HostTensor& tensor) {
    return tensor.size() * static_cast<std::int64_t>(size_of(tensor.view.dtype));
}

}  // namespace

GpuTensors::GpuTensors(const Case& c) : device_(c.device), repeated_(is_long(c)) {
    Case on_host = repeated_ ? shortened(c) : c;
    on_host.device = {};
    host_ = make_instance(on_host);
    if (!repeated_) return;
    for (HostTensor& tensor : host_.tensors) {
        TensorView& view = tensor.view;
        if (by_token(tensor)) {
            view.stride[0] = view.stride[0] / view.shape[1] * c.tokens;
            view.shape[1] = c.tokens;
        }
        if (tensor.name != "cu_seqlens") continue;
        double offset = 0;
        for (std::size_t n = 0; n < c.lens.size(); ++n) {
            offset += static_cast<double>(c.lens[n]);
            store(view.data, view.dtype, static_cast<std::int64_t>(n) + 1, offset);
        }
    }
    each_argument(host_, [&](TensorView& view) {
        for (const HostTensor& tensor : host_.tensors) {
            if (view.given() && view.data == tensor.view.data) view = tensor.view;
        }
    });
}

std::int64_t GpuTensors::bytes() const {
    if (!repeated_) return host_.bytes();
    std::int64_t total = 0;
    for (const HostTensor& tensor : host_.tensors) total += bytes_of(tensor);
    return total;
}

Result<DeviceCopy> GpuTensors::copy() const {
    DeviceCopy copy{host_, {}, {}};
    std::vector<Block> blocks;
    for (const HostTensor& tensor : host_.tensors) {
        const Storage* storage = tensor.storage.get();
        bool known = false;
        for (const Block& block : blocks) known = known || block.host == storage;
        if (known) continue;
        const auto bytes = static_cast<std::size_t>(repeated_ ? bytes_of(tensor) : storage->bytes());
        Status status;
        copy.memory.push_back(allocate_on_gpu(device_, bytes, status));
        copy.bytes.push_back(bytes);
        if (status.ok()) {
            status = repeat_on_gpu(copy.memory.back().get(), bytes, storage->data(),
                                   static_cast<std::size_t>(storage->bytes()));
        }
        if (!status.ok()) return status;
        blocks.push_back({storage, copy.memory.back().get()});
    }
    std::string lost;
    each_argument(copy.instance, [&](TensorView& view) {
        if (!view.given()) return;
        view.device = device_;
        const auto address = reinterpret_cast<std::uintptr_t>(view.data);
        for (const Block& block : blocks) {
            const auto begin = reinterpret_cast<std::uintptr_t>(block.host->data());
            if (address < begin || address > begin + static_cast<std::uintptr_t>(block.host->bytes())) continue;
            view.data = block.gpu + (address - begin);
            return;
        }
        lost = "an argument lies in no tensor of its instance";
    });
    if (!lost.empty()) return Status(Code::internal, lost);
    return copy;
}

}  // namespace flashqla::cases
