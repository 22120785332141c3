// The checks of one call: every argument against the plan, reduced to what backends read (base/call.hpp). The first
// fault becomes the Status and every later check is skipped. Nothing is allocated unless there is a fault.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "api/overlap.hpp"
#include "api/plan.hpp"
#include "api/text.hpp"

namespace flashqla {

// What a dimension may be: exactly n, or at least n.
struct Dim {
    std::int64_t size;
    bool exact = true;
    Dim(std::int64_t n) noexcept : size(n) {}
    Dim(std::int64_t n, bool is_exact) noexcept : size(n), exact(is_exact) {}
    bool allows(std::int64_t n) const noexcept { return exact ? n == size : n >= size; }
};
inline Dim at_least(std::int64_t n) noexcept { return {n, false}; }

enum class Need { required, optional };
enum class Role {
    input,
    output,
    in_place,  // read and written; overlaps like an output
};

// Which dtypes an argument may have, as bits.
using DTypes = std::uint32_t;
constexpr DTypes one_of(DType dtype) noexcept { return 1u << static_cast<std::uint32_t>(dtype); }
inline constexpr DTypes kFloats = one_of(DType::f32) | one_of(DType::f16) | one_of(DType::bf16);
inline constexpr DTypes kIntegers = one_of(DType::i32) | one_of(DType::i64);
inline constexpr DTypes kFlags = one_of(DType::u8) | one_of(DType::i32);

// Two arguments that may be exactly the same view.
struct SamePair {
    const char* first = nullptr;
    const char* second = nullptr;
};

class Checks {
public:
    // Checks the plan and the workspace. `function` is the name that error sentences begin with.
    Checks(const char* function, const Plan& plan, Pass pass, Workspace workspace);

    bool ok() const noexcept { return status_.ok(); }
    const Status& status() const noexcept { return status_; }
    const Plan::Impl& plan() const noexcept { return *plan_; }  // call only after ok()
    const PlannedPass& planned() const noexcept { return plan_->of(pass_); }
    std::byte* workspace() const noexcept { return workspace_; }
    // Scratch for sorting slots, and its size.
    std::int64_t* slot_check() const noexcept { return planned().slot_check.in(workspace_); }

    // [B,T,H] or [B,T,H,D]
    TokenRef tokens(const char* name, const TensorView& view, std::initializer_list<Dim> shape, DTypes dtypes,
                    Role role, Need need = Need::required);
    // [Hv]
    HeadRef heads(const char* name, const TensorView& view, Role role, Need need = Need::optional);
    // [rows,Hv,K,V] in the plan's layout
    StateRef states(const char* name, const TensorView& view, Dim rows, Role role, Need need = Need::optional);
    // [rows,steps,Hv,K,V] in the plan's layout
    StateRef state_steps(const char* name, const TensorView& view, Dim rows, Dim steps, Role role,
                         Need need = Need::optional);
    // [N] or [N,S]
    IndexRef indices(const char* name, const TensorView& view, std::initializer_list<Dim> shape, DTypes dtypes,
                     Need need = Need::optional, bool any_stride = false);

    // An argument that this plan or this combination does not use.
    void unused(const char* name, const TensorView& view, const char* why);

    // After all tensors: no output may overlap an input, another output or the workspace. The one exception is
    // `in_place`.
    void no_overlaps(SamePair in_place = {});

    template <class... Parts>
    void fail(Code code, const Parts&... parts) {
        if (status_.ok()) status_ = Status(code, say(function_, ": ", parts...));
    }
    template <class... Parts>
    void bad(const Parts&... parts) {
        fail(Code::invalid_argument, parts...);
    }

    // Whether the host may read tensors, i.e. the content of index tensors can be checked.
    bool host_reads() const noexcept { return plan_->device.type == DeviceType::cpu; }

private:
    void check_workspace(Workspace workspace, std::size_t needed);
    // Everything but layout: given, shape, dtype, device, strides, data. False: not given, or a fault.
    bool view_is_good(const char* name, const TensorView& view, std::initializer_list<Dim> shape, DTypes dtypes,
                      Role role, Need need, bool any_stride);
    bool states_are_good(const char* name, const TensorView& view, std::initializer_list<Dim> shape, Role role,
                         Need need);
    // The next argument that the overlap check looks at, to be filled in place and then counted. NOTE: an extent that
    // has just been written field by field is slow to copy: the processor waits until the fields are in the cache.
    Extent& next_extent() noexcept { return entries_[count_].extent; }
    bool remember(const char* name, Role role);

    struct Entry {
        const char* name;
        Extent extent;
        Role role;
    };
    static constexpr int kMaxEntries = 24;  // more than the arguments of any call

    const char* function_;
    const Plan::Impl* plan_;
    Pass pass_;
    std::byte* workspace_ = nullptr;
    Status status_;
    Entry entries_[kMaxEntries + 1];  // the last one is never counted
    int count_ = 0;
};

}  // namespace flashqla
