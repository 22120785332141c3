// The C interface under arbitrary arguments. A small valid call is built from the input, then a few of its arguments
// are broken. Whatever comes in: a function returns FQLA_OK or a sentence, reads and writes only inside the views it
// was given (each lies in an allocation of exactly its extent, so that AddressSanitizer sees the first byte outside),
// never changes an input, and a refused call changes nothing at all.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "flashqla/flashqla.h"
#include "fuzz_input.hpp"

namespace {

using flashqla::fuzz::Bytes;
using flashqla::fuzz::require;

constexpr std::int64_t kMostBytes = 1 << 20;  // of a view; larger ones are not run

std::int64_t width_of(std::int32_t dtype) {
    switch (dtype) {
        case FQLA_F32:
        case FQLA_I32: return 4;
        case FQLA_F16:
        case FQLA_BF16: return 2;
        case FQLA_I64: return 8;
        default: return 1;
    }
}

// ---------------------------------------------------------------------------------------------------- memory

// The bytes of a view, and what they were before the call.
struct Block {
    std::unique_ptr<unsigned char[]> bytes;
    std::size_t size = 0;
    std::vector<unsigned char> before;
};

// Elements that a view reaches below and above its first one. In floating point, where nothing overflows.
struct Reach {
    double below = 0, above = 0;
    bool empty = false;
};

Reach reach_of(const fqla_tensor& t) {
    Reach r;
    for (std::int32_t i = 0; i < std::clamp(t.rank, 0, FQLA_MAX_RANK); ++i) {
        if (t.shape[i] <= 0) return {0, 0, true};
        const double steps = static_cast<double>(t.shape[i] - 1) * static_cast<double>(t.stride[i]);
        (steps < 0 ? r.below : r.above) += std::abs(steps);
    }
    return r;
}

// The same as whole numbers, the first element included; false when that is too much to allocate.
bool extent_of(const fqla_tensor& t, std::int64_t& below, std::int64_t& above) {
    const Reach r = reach_of(t);
    below = above = 0;
    if (r.empty) return true;
    if (r.below + r.above >= static_cast<double>(kMostBytes / width_of(t.dtype))) return false;
    below = static_cast<std::int64_t>(r.below);
    above = static_cast<std::int64_t>(r.above) + 1;
    return true;
}

// A call must refuse such a view without touching it.
bool beyond_address_space(const fqla_tensor& t) {
    const Reach r = reach_of(t);
    return r.below + r.above > 0x1p63;
}

// ------------------------------------------------------------------------------------------------ a valid call

struct Sizes {
    std::int64_t rows = 1, tokens = 1, slots = 1, longest = 1;
    bool packed = false;
    std::vector<std::int64_t> offsets;  // cu_seqlens
};

fqla_problem draw_problem(Bytes& in, Sizes& sizes, bool decode) {
    static const std::int32_t kDims[] = {4, 1, 2, 3, 8, 16, 17, 31, 32, 33, 40, 64};
    static const std::int32_t kIo[] = {FQLA_F32, FQLA_BF16, FQLA_F16};
    fqla_problem p = fqla_problem_init();
    p.heads_k = static_cast<std::int32_t>(in.from(1, 2));
    p.heads_v = p.heads_k * static_cast<std::int32_t>(in.from(1, 3));
    p.dim_k = kDims[in.from(0, 11)];
    p.dim_v = kDims[in.from(0, 11)];
    p.io = kIo[in.from(0, 2)];
    if (in.one_in(4)) p.out = FQLA_F32;
    p.gate = (FQLA_GATE_LOG + static_cast<std::int32_t>(in.from(0, 2))) % 3;
    p.beta_mode = static_cast<std::int32_t>(in.from(0, 1));
    p.beta_factor = static_cast<float>(in.from(1, 2));
    p.qk_l2norm = static_cast<std::int32_t>(in.from(0, 1));
    p.grouping = static_cast<std::int32_t>(in.from(0, 1));
    p.state_layout = static_cast<std::int32_t>(in.from(0, 1));
    p.pad_rule = static_cast<std::int32_t>(in.from(0, 1));
    p.checkpoints = static_cast<std::int32_t>(in.from(0, 3));
    if (p.checkpoints == FQLA_CHECKPOINTS_EVERY_N) p.checkpoint_every = in.from(1, 70);
    p.for_backward = static_cast<std::int32_t>(in.from(0, 1));

    sizes.packed = in.one_in(2);
    const std::int64_t longest = decode ? 16 : 100;
    if (sizes.packed) {
        sizes.rows = in.from(1, 5);
        sizes.offsets = {0};
        for (std::int64_t n = 0; n < sizes.rows; ++n) {
            const std::int64_t length = in.one_in(4) ? 0 : in.from(0, longest);
            sizes.longest = std::max(sizes.longest, length);
            sizes.offsets.push_back(sizes.offsets.back() + length);
        }
        p.tokens = sizes.offsets.back() + in.from(0, 3);
        p.sequences = sizes.rows;
        p.decode_rows = in.one_in(3) ? in.from(0, sizes.rows) : 0;
    } else {
        p.batch = sizes.rows = in.from(1, 3);
        p.tokens = sizes.longest = in.from(0, longest);
    }
    sizes.tokens = p.tokens;
    sizes.slots = sizes.rows + in.from(0, 4);
    return p;
}

void break_problem(Bytes& in, fqla_problem& p) {
    std::int32_t* const numbers[] = {&p.heads_k,      &p.heads_v,  &p.dim_k,       &p.dim_v,       &p.io,
                                     &p.out,          &p.gate,     &p.beta_mode,   &p.qk_l2norm,   &p.grouping,
                                     &p.state_layout, &p.pad_rule, &p.checkpoints, &p.for_backward};
    std::int64_t* const sizes[] = {&p.batch, &p.tokens, &p.sequences, &p.checkpoint_every, &p.decode_rows};
    float* const floats[] = {&p.beta_factor, &p.l2norm_eps, &p.scale};
    switch (in.from(0, 3)) {
        case 0: *numbers[in.from(0, 13)] = static_cast<std::int32_t>(in.extreme()); break;
        case 1: *sizes[in.from(0, 4)] = in.extreme(); break;
        case 2: {
            const auto bits = static_cast<std::uint32_t>(in.word());
            std::memcpy(floats[in.from(0, 2)], &bits, sizeof bits);
            break;
        }
        default: p.struct_size = static_cast<std::uint32_t>(in.extreme()); break;
    }
}

// A struct in an allocation of exactly the size it claims (and of at least its first field).
template <class Struct>
class Claimed {
public:
    explicit Claimed(const Struct& value) {
        const std::size_t claimed = value.struct_size, most = 1u << 16;
        const std::size_t size = claimed > most ? 8 : std::max<std::size_t>(claimed, 4);
        bytes_ = std::make_unique<std::uint64_t[]>(size / 8 + 1);
        memory_.reset(static_cast<unsigned char*>(std::malloc(size)));
        std::memset(memory_.get(), 0, size);
        std::memcpy(memory_.get(), &value, std::min(size, sizeof value));
    }
    const Struct* get() const { return reinterpret_cast<const Struct*>(memory_.get()); }

private:
    struct Free {
        void operator()(unsigned char* p) const { std::free(p); }
    };
    std::unique_ptr<std::uint64_t[]> bytes_;
    std::unique_ptr<unsigned char, Free> memory_;
};

enum class Content { floats, offsets, slots, flags, list, accepted, parents };

struct Argument {
    fqla_tensor* view;
    Content content;
    bool output;
};

// Builds the arguments of one call, breaks some of them, gives them memory, and judges what the call did to it.
class Call {
public:
    Call(Bytes& in, const fqla_problem& p, const Sizes& sizes) : in_(in), p_(p), sizes_(sizes) {}

    void add(fqla_tensor& view, std::int32_t dtype, std::vector<std::int64_t> shape, Content content = Content::floats,
             bool output = false) {
        std::int64_t stride[FQLA_MAX_RANK];
        const auto rank = static_cast<std::int32_t>(shape.size());
        std::int64_t next = 1;
        // States keep their inner two dimensions together; any other dimension may have a gap or, in inputs, no stride.
        const int free_axes = rank - (rank >= 4 && is_state_ ? 2 : 1);
        for (std::int32_t i = rank; i-- > 0;) {
            stride[i] = next;
            next *= std::max<std::int64_t>(shape[static_cast<std::size_t>(i)], 1);
            if (i > 0 && i - 1 < free_axes && in_.one_in(8)) next += in_.from(1, 7);
        }
        if (free_axes > 0 && in_.one_in(16)) {
            std::int64_t& s = stride[in_.from(0, free_axes - 1)];
            s = !output && in_.one_in(2) ? 0 : -s;
        }
        view = fqla_tensor_of(nullptr, dtype, rank, shape.data(), stride);
        arguments_.push_back({&view, content, output});
    }
    void add_state(fqla_tensor& view, std::vector<std::int64_t> rows, bool output) {
        static const std::int32_t kTypes[] = {FQLA_F32, FQLA_BF16, FQLA_F16};
        rows.push_back(p_.heads_v);
        rows.push_back(p_.state_layout == FQLA_STATE_KV ? p_.dim_k : p_.dim_v);
        rows.push_back(p_.state_layout == FQLA_STATE_KV ? p_.dim_v : p_.dim_k);
        is_state_ = true;
        add(view, kTypes[in_.from(0, 2)], std::move(rows), Content::floats, output);
        is_state_ = false;
    }
    void add_indices(fqla_tensor& view, std::vector<std::int64_t> shape, Content content) {
        add(view, in_.one_in(2) ? FQLA_I64 : FQLA_I32, std::move(shape), content);
    }
    // g, beta, A_log, dt_bias: any float type.
    void add_gate(fqla_tensor& view, std::vector<std::int64_t> shape, bool output = false) {
        static const std::int32_t kTypes[] = {FQLA_F32, FQLA_BF16, FQLA_F16};
        add(view, kTypes[in_.from(0, 2)], std::move(shape), Content::floats, output);
    }
    template <class Args>
    void add_inputs(Args& args) {
        const std::int64_t b = p_.batch, t = p_.tokens;
        add(args.q, p_.io, {b, t, p_.heads_k, p_.dim_k});
        add(args.k, p_.io, {b, t, p_.heads_k, p_.dim_k});
        add(args.v, p_.io, {b, t, p_.heads_v, p_.dim_v});
        if (p_.gate != FQLA_GATE_NONE) add_gate(args.g, {b, t, p_.heads_v});
        if (!in_.one_in(4)) add_gate(args.beta, {b, t, p_.heads_v});
        if (p_.gate == FQLA_GATE_RAW) {
            add_gate(args.A_log, {p_.heads_v});
            if (!in_.one_in(3)) add_gate(args.dt_bias, {p_.heads_v});
        }
        if (sizes_.packed) add_indices(args.cu_seqlens, {sizes_.rows + 1}, Content::offsets);
    }
    bool chance(int n) { return in_.one_in(n); }

    // Changes up to three arguments; all of the struct's tensors may be hit, those that were left out too.
    void break_some(fqla_tensor* first, int count) {
        for (std::int64_t changes = in_.from(0, 9) - 6; changes > 0; --changes) {
            fqla_tensor& t = first[in_.from(0, count - 1)];
            const auto axis = static_cast<std::size_t>(in_.from(0, FQLA_MAX_RANK - 1));
            switch (in_.from(0, 10)) {
                case 0: t = fqla_tensor{}; break;
                case 1: t.dtype = static_cast<std::int32_t>(in_.one_in(4) ? in_.extreme() : in_.from(0, 7)); break;
                case 2: t.rank = static_cast<std::int32_t>(in_.one_in(2) ? in_.extreme() : in_.from(0, 7)); break;
                case 3: t.shape[axis] = in_.one_in(2) ? in_.extreme() : in_.from(0, 40); break;
                case 4: t.stride[axis] = in_.one_in(2) ? in_.extreme() : in_.from(-2, 40); break;
                case 5: t.device.type = static_cast<std::int32_t>(in_.extreme()); break;
                case 6: t.device.index = static_cast<std::int32_t>(in_.extreme()); break;
                case 7: null_.push_back(&t); break;
                case 8: misaligned_.push_back(&t); break;
                case 9: aliases_.push_back({&t, first + in_.from(0, count - 1)}); break;
                default: t = first[in_.from(0, count - 1)]; break;
            }
        }
        for (int i = 0; i < count; ++i) {
            const auto known = std::find_if(arguments_.begin(), arguments_.end(),
                                            [&](const Argument& x) { return x.view == first + i; });
            // What was broken into a tensor although it was left out: nobody may write to it.
            if (known == arguments_.end() && first[i].dtype != 0) {
                arguments_.push_back({first + i, Content::slots, false});
            }
        }
    }
    void in_place(fqla_tensor& same, const fqla_tensor& as) {
        same = as;
        aliases_.push_back({&same, const_cast<fqla_tensor*>(&as)});
    }

    // False: a view is too large to be given memory, so the call cannot be made.
    bool allocate() {
        blocks_.resize(arguments_.size());
        for (std::size_t i = 0; i < arguments_.size(); ++i) {
            fqla_tensor& t = *arguments_[i].view;
            std::int64_t below = 0, above = 0;
            if (!extent_of(t, below, above)) {
                if (!beyond_address_space(t)) return false;
                below = above = 0;
            }
            const bool misaligned = contains(misaligned_, &t);
            const auto width = static_cast<std::size_t>(width_of(t.dtype));
            Block& block = blocks_[i];
            block.size = static_cast<std::size_t>(below + above) * width + (misaligned ? 1 : 0);
            block.bytes.reset(new unsigned char[block.size]);
            t.data = block.bytes.get() + static_cast<std::size_t>(below) * width + (misaligned ? 1 : 0);
            fill(arguments_[i], block);
        }
        for (const auto& [t, other] : aliases_) {
            std::int64_t below = 0, above = 0, other_below = 0, other_above = 0;
            if (!extent_of(*t, below, above) || !extent_of(*other, other_below, other_above)) continue;
            if (below * width_of(t->dtype) <= other_below * width_of(other->dtype) &&
                above * width_of(t->dtype) <= other_above * width_of(other->dtype)) {
                t->data = other->data;
            }
        }
        for (fqla_tensor* t : null_) t->data = nullptr;
        for (Block& block : blocks_) block.before.assign(block.bytes.get(), block.bytes.get() + block.size);
        return true;
    }

    // Inputs never change; after a refusal nothing has.
    void judge(fqla_status status, const char* function) const {
        for (std::size_t i = 0; i < blocks_.size(); ++i) {
            const Block& block = blocks_[i];
            if (block.size == 0 || std::memcmp(block.bytes.get(), block.before.data(), block.size) == 0) continue;
            require(status == FQLA_OK, "a refused call changes nothing:", function);
            bool shared_with_output = arguments_[i].output;
            for (const auto& [t, other] : aliases_) {
                for (const Argument& x : arguments_) {
                    shared_with_output = shared_with_output || (other == arguments_[i].view && t == x.view && x.output);
                }
            }
            require(shared_with_output, "an input is never written:", function);
        }
    }

private:
    static bool contains(const std::vector<fqla_tensor*>& list, const fqla_tensor* t) {
        return std::find(list.begin(), list.end(), t) != list.end();
    }

    std::int64_t number(Content content, std::int64_t i) {
        if (in_.one_in(40)) return in_.extreme();
        switch (content) {
            case Content::offsets:
                return i < static_cast<std::int64_t>(sizes_.offsets.size())
                           ? sizes_.offsets[static_cast<std::size_t>(i)] + (in_.one_in(30) ? in_.from(-3, 3) : 0)
                           : 0;
            case Content::slots: return in_.one_in(8) ? in_.from(-2, sizes_.slots + 2) : i;
            case Content::flags: return in_.from(0, 1);
            case Content::list: return i % 2 ? in_.from(0, in_.one_in(4) ? sizes_.longest : 0) : i / 2 % sizes_.rows;
            case Content::accepted: return in_.from(in_.one_in(4) ? -1 : 1, in_.one_in(4) ? 18 : 1);
            default: return in_.from(-1, in_.one_in(4) ? 3 : 0);
        }
    }

    // NOTE: integers are drawn for each place of the block in turn, whatever the view's strides are.
    void fill(const Argument& argument, Block& block) {
        const std::int32_t dtype = argument.view->dtype;
        const auto offset =
            static_cast<std::size_t>(static_cast<unsigned char*>(argument.view->data) - block.bytes.get());
        const auto width = static_cast<std::size_t>(width_of(dtype));
        const bool integers = argument.content != Content::floats;
        const std::uint64_t noise = integers ? 0 : in_.word();
        const bool wild = !integers && in_.one_in(6);
        for (std::size_t at = offset % width, i = 0; at + width <= block.size; at += width, ++i) {
            std::uint64_t value = 0;
            if (integers) {
                value = static_cast<std::uint64_t>(number(argument.content, static_cast<std::int64_t>(i)));
            } else {
                // Floats between -1 and 1, or any bits: infinities, NaN and denormals among them.
                std::uint64_t x = noise + i * 0x9e3779b97f4a7c15ull;
                x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
                x ^= x >> 27;
                const float f = static_cast<float>(static_cast<std::int64_t>(x % 2001) - 1000) / 1000.0f;
                std::uint32_t bits = 0;
                std::memcpy(&bits, &f, sizeof bits);
                value = wild ? x : dtype == FQLA_F32 ? bits : bits >> 16;
            }
            std::memcpy(block.bytes.get() + at, &value, width);
        }
    }

    Bytes& in_;
    const fqla_problem& p_;
    const Sizes& sizes_;
    std::vector<Argument> arguments_;
    std::vector<Block> blocks_;
    std::vector<fqla_tensor*> null_, misaligned_;
    std::vector<std::pair<fqla_tensor*, fqla_tensor*>> aliases_;
    bool is_state_ = false;
};

// ------------------------------------------------------------------------------------------------------ running

void check_status(fqla_status status, const char* function) {
    require(status >= FQLA_OK && status < FQLA_INTERNAL, "no internal error:", fqla_last_error());
    if (status == FQLA_OK) return;
    const char* text = fqla_last_error();
    require(std::strlen(text) > 20 && (std::strstr(text, "::") != nullptr || std::strncmp(text, "fqla_", 5) == 0),
            "an error is a sentence that names its function:", function);
}

// Scratch of exactly the plan's size, or broken in one of the ways it can be.
class Scratch {
public:
    Scratch(Bytes& in, std::size_t bytes) : size(bytes) {
        memory_ = std::aligned_alloc(64, (bytes + 127) / 64 * 64);
        // The allocation is rounded up to the alignment; the scratch ends where it ends.
        auto* end = static_cast<unsigned char*>(memory_) + (bytes + 127) / 64 * 64;
        data = end - (bytes + 63) / 64 * 64;
        std::memset(memory_, 0xff, (bytes + 127) / 64 * 64);
        if (!in.one_in(16)) return;
        switch (in.from(0, 2)) {
            case 0: size -= std::min<std::size_t>(size, 1); break;
            case 1: data = nullptr; break;
            default: data = static_cast<unsigned char*>(data) - 1; break;
        }
    }
    ~Scratch() { std::free(memory_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    void* data;
    std::size_t size;

private:
    void* memory_;
};

template <class Args>
void run(Bytes& in, fqla_plan* plan, int pass, Call& call, Args& args, fqla_tensor* first, int count,
         fqla_status (*function)(const fqla_plan*, const Args*, void*, std::size_t, void*), const char* name) {
    call.break_some(first, count);
    if (!call.allocate()) return;
    if (in.one_in(40)) args.struct_size = static_cast<std::uint32_t>(in.extreme());
    const std::size_t bytes = fqla_plan_workspace_bytes(plan, pass);
    if (bytes > (64u << 20)) return;
    const Claimed<Args> claimed(args);
    const Scratch scratch(in, bytes);
    const fqla_status status = function(plan, claimed.get(), scratch.data, scratch.size, nullptr);
    check_status(status, name);
    call.judge(status, name);
}

void run_forward(Bytes& in, fqla_plan* plan, const fqla_problem& p, const Sizes& sizes) {
    fqla_forward_args args = fqla_forward_args_init();
    Call call(in, p, sizes);
    call.add_inputs(args);
    const bool pool = call.chance(3);
    const std::int64_t rows = pool ? sizes.slots : sizes.rows;
    if (!call.chance(3)) call.add_state(args.initial_state, {rows}, false);
    if (!call.chance(3)) call.add_state(args.final_state, {rows}, true);
    if (args.initial_state.dtype && args.final_state.dtype && call.chance(3)) {
        call.in_place(args.final_state, args.initial_state);
    }
    if (pool) call.add_indices(args.state_indices, {sizes.rows}, Content::slots);
    if (pool && call.chance(3)) call.add_indices(args.state_indices_out, {sizes.rows}, Content::slots);
    if (call.chance(4)) {
        call.add(args.has_initial_state, call.chance(2) ? FQLA_I32 : FQLA_U8, {sizes.rows}, Content::flags);
    }
    if (p.checkpoints != FQLA_CHECKPOINTS_NONE) {
        const bool listed = p.checkpoints == FQLA_CHECKPOINTS_LISTED;
        const std::int64_t count = listed ? 3 : fqla_plan_checkpoint_rows(plan);
        call.add_state(args.checkpoints, {count}, true);
        if (listed) call.add_indices(args.checkpoint_list, {count, 2}, Content::list);
    }
    const std::int32_t out = p.out == FQLA_NONE ? p.io : p.out;
    call.add(args.o, out, {p.batch, p.tokens, p.heads_v, p.dim_v}, Content::floats, true);
    run(in, plan, FQLA_FORWARD, call, args, &args.q, 16, &fqla_forward, "fqla_forward");
}

void run_backward(Bytes& in, fqla_plan* plan, const fqla_problem& p, const Sizes& sizes) {
    fqla_backward_args args = fqla_backward_args_init();
    Call call(in, p, sizes);
    const std::int64_t b = p.batch, t = p.tokens;
    call.add_inputs(args);
    if (!call.chance(3)) call.add_state(args.initial_state, {sizes.rows}, false);
    if (!call.chance(6)) call.add_gate(args.d_o, {b, t, p.heads_v, p.dim_v});
    if (!call.chance(3)) call.add_state(args.d_final_state, {sizes.rows}, false);
    if (!call.chance(6)) call.add_gate(args.d_q, {b, t, p.heads_k, p.dim_k}, true);
    if (!call.chance(6)) call.add_gate(args.d_k, {b, t, p.heads_k, p.dim_k}, true);
    if (!call.chance(6)) call.add_gate(args.d_v, {b, t, p.heads_v, p.dim_v}, true);
    if (p.gate != FQLA_GATE_NONE && !call.chance(6)) call.add_gate(args.d_g, {b, t, p.heads_v}, true);
    if (!call.chance(6)) call.add_gate(args.d_beta, {b, t, p.heads_v}, true);
    if (p.gate == FQLA_GATE_RAW && !call.chance(3)) call.add_gate(args.d_A_log, {p.heads_v}, true);
    if (args.dt_bias.dtype && !call.chance(3)) call.add_gate(args.d_dt_bias, {p.heads_v}, true);
    if (args.initial_state.dtype && !call.chance(3)) call.add_state(args.d_initial_state, {sizes.rows}, true);
    run(in, plan, FQLA_BACKWARD, call, args, &args.q, 19, &fqla_backward, "fqla_backward");
}

void run_decode(Bytes& in, fqla_plan* plan, const fqla_problem& p, const Sizes& sizes) {
    fqla_decode_args args = fqla_decode_args_init();
    Call call(in, p, sizes);
    call.add_inputs(args);
    const std::int64_t verify = in.from(0, 3);  // 0 plain, 1 a slot per token, 2 buffer, 3 tree
    const std::int64_t columns = sizes.longest + in.from(0, 2);
    const std::int64_t slots = verify == 1 ? sizes.rows * columns + 2 : sizes.slots;
    call.add_state(args.state, {slots}, true);
    if (verify == 1) {
        call.add_indices(args.state_indices, {sizes.rows, columns}, Content::slots);
        if (!in.one_in(3)) call.add_indices(args.num_accepted, {sizes.rows}, Content::accepted);
    } else if (!in.one_in(3)) {
        call.add_indices(args.state_indices, {sizes.rows}, Content::slots);
        if (in.one_in(4)) call.add_indices(args.state_indices_out, {sizes.rows}, Content::slots);
    }
    if (in.one_in(4)) {
        call.add(args.has_initial_state, in.one_in(2) ? FQLA_I32 : FQLA_U8, {sizes.rows}, Content::flags);
    }
    if (verify >= 2) {
        call.add_state(args.intermediate_states, {sizes.rows + in.from(0, 2), columns}, true);
        if (in.one_in(2)) call.add_indices(args.intermediate_indices, {sizes.rows}, Content::slots);
        args.commit_state = static_cast<std::int32_t>(in.from(0, 1));
    }
    if (verify == 3) {
        args.commit_state = 0;
        call.add_indices(args.parent_tokens, {sizes.rows, columns}, Content::parents);
    }
    const std::int32_t out = p.out == FQLA_NONE ? p.io : p.out;
    call.add(args.o, out, {p.batch, p.tokens, p.heads_v, p.dim_v}, Content::floats, true);
    run(in, plan, FQLA_DECODE, call, args, &args.q, 17, &fqla_decode, "fqla_decode");
}

void run_commit(Bytes& in, fqla_plan* plan, const fqla_problem& p, const Sizes& sizes) {
    fqla_commit_args args = fqla_commit_args_init();
    Call call(in, p, sizes);
    call.add_state(args.state, {sizes.slots}, true);
    if (!in.one_in(3)) call.add_indices(args.state_indices, {sizes.rows}, Content::slots);
    call.add_state(args.intermediate_states, {sizes.rows + in.from(0, 2), sizes.longest + in.from(0, 2)}, false);
    if (in.one_in(2)) call.add_indices(args.intermediate_indices, {sizes.rows}, Content::slots);
    call.add_indices(args.accepted, {sizes.rows}, Content::accepted);
    run(in, plan, FQLA_DECODE, call, args, &args.state, 5, &fqla_commit, "fqla_commit");
}

fqla_plan* make_plan(Bytes& in, const fqla_problem& p) {
    static const char* const kBackends[] = {"cpu", "", "reference", "nosuch"};
    fqla_plan_options options = fqla_plan_options_init();
    options.backend = kBackends[in.one_in(8) ? in.from(0, 3) : 0];
    options.threads = static_cast<std::int32_t>(in.one_in(20) ? in.extreme() : in.from(1, 2));
    options.context_split = static_cast<std::int32_t>(in.one_in(20) ? in.extreme() : in.from(0, 3));
    options.deterministic = static_cast<std::int32_t>(in.from(0, 1));
    options.batch_invariant = static_cast<std::int32_t>(in.from(0, 1));
    if (in.one_in(60)) options.struct_size = static_cast<std::uint32_t>(in.extreme());
    fqla_device device = fqla_cpu();
    if (in.one_in(60)) device.type = static_cast<std::int32_t>(in.from(0, 3));
    if (in.one_in(60)) device.index = static_cast<std::int32_t>(in.extreme());

    const Claimed<fqla_problem> problem(p);
    const Claimed<fqla_plan_options> claimed(options);
    fqla_plan* plan = nullptr;
    const fqla_status status = fqla_plan_create(problem.get(), device, in.one_in(60) ? nullptr : claimed.get(), &plan);
    check_status(status, "fqla_plan_create");
    require((status == FQLA_OK) == (plan != nullptr), "a plan comes with FQLA_OK, and only then");
    return plan;
}

void ask_plan(Bytes& in, const fqla_plan* plan) {
    std::vector<char> text(static_cast<std::size_t>(in.byte()));
    const std::size_t length = fqla_plan_explain(plan, text.data(), text.size());
    require(length > 0, "a plan can explain itself");
    if (!text.empty()) require(std::memchr(text.data(), 0, text.size()) != nullptr, "a text ends with a zero");
    const auto pass = static_cast<std::int32_t>(in.from(-1, 3));
    require(fqla_plan_backend(plan, pass) != nullptr, "a backend has a name");
    require(fqla_plan_workspace_bytes(plan, pass) % 64 == 0, "workspaces are multiples of 64 bytes");
    require(fqla_plan_checkpoint_rows(plan) >= 0, "no negative row counts");
    fqla_problem problem = fqla_problem_init();
    require(fqla_plan_problem(plan, &problem) == FQLA_OK, "a plan knows its problem");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Bytes in(data, size);
    const std::int64_t pass = in.from(0, 3);
    Sizes sizes;
    fqla_problem p = draw_problem(in, sizes, pass >= 2);
    if (pass == 1) p.for_backward = 1;
    fqla_problem asked = p;
    const bool broken_problem = in.one_in(8);
    if (broken_problem) break_problem(in, asked);
    fqla_plan* plan = make_plan(in, asked);
    if (plan) {
        ask_plan(in, plan);
        // A plan for something else than the arguments are made for: every call has to notice.
        switch (pass) {
            case 0: run_forward(in, plan, p, sizes); break;
            case 1: run_backward(in, plan, p, sizes); break;
            case 2: run_decode(in, plan, p, sizes); break;
            default: run_commit(in, plan, p, sizes); break;
        }
    }
    fqla_plan_destroy(plan);
    return 0;
}
