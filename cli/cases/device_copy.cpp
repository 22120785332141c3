#include "cases/device_copy.hpp"

#include <cstdint>
#include <string>

#include "cases/device_memory.hpp"

namespace flashqla::cases {
namespace {

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

}  // namespace

Result<DeviceCopy> copy_to_gpu(const Instance& from, Device device) {
    DeviceCopy copy{from, {}};
    std::vector<Block> blocks;
    for (const HostTensor& tensor : from.tensors) {
        const Storage* storage = tensor.storage.get();
        bool known = false;
        for (const Block& block : blocks) known = known || block.host == storage;
        if (known) continue;
        Status status;
        copy.memory.push_back(copy_to_gpu(device, storage->data(), static_cast<std::size_t>(storage->bytes()), status));
        if (!status.ok()) return status;
        blocks.push_back({storage, copy.memory.back().get()});
    }
    std::string lost;
    each_argument(copy.instance, [&](TensorView& view) {
        if (!view.given()) return;
        view.device = device;
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
