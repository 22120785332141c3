#include "api/checks.hpp"

#include <algorithm>
#include <cstring>

namespace flashqla {
namespace {

std::string shape_text(const TensorView& view) {
    std::string text = "[";
    for (std::int32_t i = 0; i < view.rank && i < kMaxRank; ++i) text += say(i ? "," : "", view.shape[i]);
    if (view.rank < 0 || view.rank > kMaxRank) text += say("...rank ", view.rank);
    return text + "]";
}

std::string shape_text(std::initializer_list<Dim> shape) {
    std::string text = "[";
    for (const Dim& dim : shape) text += say(text.size() > 1 ? "," : "", dim.exact ? "" : ">=", dim.size);
    return text + "]";
}

std::string dtypes_text(DTypes dtypes) {
    std::string text;
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::i32, DType::i64, DType::u8}) {
        if (dtypes & one_of(dtype)) text += say(text.empty() ? "" : " or ", name_of(dtype));
    }
    return text;
}

bool shape_fits(const TensorView& view, std::initializer_list<Dim> shape) noexcept {
    if (view.rank != static_cast<std::int32_t>(shape.size())) return false;
    const auto allows = [](const Dim& dim, std::int64_t n) { return dim.allows(n); };
    return std::equal(shape.begin(), shape.end(), view.shape.begin(), allows);
}

bool any_zero(const TensorView& view) noexcept {
    return std::find(view.shape.begin(), view.shape.begin() + view.rank, 0) != view.shape.begin() + view.rank;
}

}  // namespace

Checks::Checks(const char* function, const Plan& plan, Pass pass, Workspace workspace)
    : function_(function), plan_(plan.impl()), pass_(pass) {
    if (plan_ == nullptr) {
        bad("the plan is empty; make one with Plan::create");
    } else if (planned().backend == nullptr) {
        status_ = planned().missing;
    } else {
        check_workspace(workspace, planned().workspace_bytes);
    }
}

void Checks::check_workspace(Workspace workspace, std::size_t needed) {
    if (needed == 0) return;
    if (workspace.bytes < needed) {
        return fail(Code::workspace_too_small, "workspace has ", workspace.bytes, " bytes; this plan needs ", needed);
    }
    if (workspace.data == nullptr) return bad("workspace is null; this plan needs ", needed, " bytes");
    if (reinterpret_cast<std::uintptr_t>(workspace.data) % kWorkspaceAlignment != 0) {
        return bad("workspace is misaligned: its address is not a multiple of ", kWorkspaceAlignment, " bytes");
    }
    workspace_ = static_cast<std::byte*>(workspace.data);
    const auto bytes = static_cast<std::int64_t>(needed);
    if (make_extent(tensor(workspace.data, DType::u8, {bytes}), next_extent())) remember("workspace", Role::output);
}

bool Checks::remember(const char* name, Role role) {
    if (count_ == kMaxEntries) {
        fail(Code::internal, "more arguments than the overlap check has room for");
        return false;
    }
    entries_[count_].name = name;
    entries_[count_].role = role;
    ++count_;
    return true;
}

bool Checks::view_is_good(const char* name, const TensorView& view, std::initializer_list<Dim> shape, DTypes dtypes,
                          Role role, Need need, bool any_stride) {
    if (!ok()) return false;
    if (!view.given()) {
        if (view.data != nullptr) bad(name, " has data but no dtype; give it a dtype, or leave it out altogether");
        if (need == Need::required) bad(name, " is not given; this plan needs ", shape_text(shape));
        return false;
    }
    if (!shape_fits(view, shape)) {
        bad(name, " has shape ", shape_text(view), "; this plan needs ", shape_text(shape));
        return false;
    }
    const auto number = static_cast<std::uint32_t>(view.dtype);
    if (number >= 32 || !(dtypes & one_of(view.dtype))) {
        bad(name, " has dtype ", dtype_text(view.dtype), "; this plan needs ", dtypes_text(dtypes));
        return false;
    }
    if (!(view.device == plan_->device)) {
        bad(name, " is on ", name_of(view.device), "; this plan runs on ", name_of(plan_->device));
        return false;
    }
    if (any_zero(view)) return true;

    const std::int32_t last = view.rank - 1;
    if (!any_stride && view.shape[last] > 1 && view.stride[last] != 1) {
        bad(name, " has a last stride of ", view.stride[last], "; it must be 1");
        return false;
    }
    Extent& extent = next_extent();
    if (!make_extent(view, extent)) {
        bad(name, " has strides that lead out of the address space");
        return false;
    }
    if (role != Role::input) {
        for (std::int32_t i = 0; i < view.rank; ++i) {
            if (view.shape[i] == 1 || view.stride[i] != 0) continue;
            bad(name, " has stride 0 in dimension ", i, " of size ", view.shape[i],
                "; an output needs a place of its own for each element");
            return false;
        }
        if (overlaps_itself(extent)) {
            bad(name, " has strides that make its elements overlap; an output needs a place of its own for each");
            return false;
        }
    }
    if (view.data == nullptr) {
        bad(name, " has null data and shape ", shape_text(view), "; only a tensor without elements may be null");
        return false;
    }
    if (reinterpret_cast<std::uintptr_t>(view.data) % size_of(view.dtype) != 0) {
        bad(name, " is misaligned: its address is not a multiple of ", size_of(view.dtype), " bytes, the size of ",
            name_of(view.dtype));
        return false;
    }
    return remember(name, role);
}

TokenRef Checks::tokens(const char* name, const TensorView& view, std::initializer_list<Dim> shape, DTypes dtypes,
                        Role role, Need need) {
    if (!view_is_good(name, view, shape, dtypes, role, need, false)) return {};
    // The head stride of [B,T,H] is its last one: 1, whatever a size of 1 came with.
    const std::int64_t head = shape.size() == 4 ? view.stride[2] : 1;
    return {view.data, view.dtype, view.stride[0], view.stride[1], head};
}

HeadRef Checks::heads(const char* name, const TensorView& view, Role role, Need need) {
    if (!view_is_good(name, view, {plan_->problem.heads_v}, kFloats, role, need, false)) return {};
    return {view.data, view.dtype, 1};
}

bool Checks::states_are_good(const char* name, const TensorView& view, std::initializer_list<Dim> shape, Role role,
                             Need need) {
    if (!view_is_good(name, view, shape, kFloats, role, need, false)) return false;
    const std::int32_t last = view.rank - 1;
    if (!any_zero(view) && view.shape[last - 1] > 1 && view.stride[last - 1] != view.shape[last]) {
        bad(name, " has stride ", view.stride[last - 1], " in dimension ", last - 1,
            "; the inner two dimensions of a "
            "state are contiguous, so it must be ",
            view.shape[last]);
        return false;
    }
    return true;
}

StateRef Checks::states(const char* name, const TensorView& view, Dim rows, Role role, Need need) {
    if (!ok()) return {};
    const Problem& p = plan_->problem;
    const bool kv = p.state_layout == StateLayout::kv;
    const std::int64_t inner = kv ? p.dim_k : p.dim_v, last = kv ? p.dim_v : p.dim_k;
    if (!states_are_good(name, view, {rows, p.heads_v, inner, last}, role, need)) return {};
    return {view.data, view.dtype, view.shape[0], view.stride[0], view.stride[1], kv ? last : 1, kv ? 1 : last, 0};
}

StateRef Checks::state_steps(const char* name, const TensorView& view, Dim rows, Dim steps, Role role, Need need) {
    if (!ok()) return {};
    const Problem& p = plan_->problem;
    const bool kv = p.state_layout == StateLayout::kv;
    const std::int64_t inner = kv ? p.dim_k : p.dim_v, last = kv ? p.dim_v : p.dim_k;
    if (!states_are_good(name, view, {rows, steps, p.heads_v, inner, last}, role, need)) return {};
    return {view.data,      view.dtype,    view.shape[0], view.stride[0],
            view.stride[2], kv ? last : 1, kv ? 1 : last, view.stride[1]};
}

IndexRef Checks::indices(const char* name, const TensorView& view, std::initializer_list<Dim> shape, DTypes dtypes,
                         Need need, bool any_stride) {
    if (!view_is_good(name, view, shape, dtypes, Role::input, need, any_stride)) return {};
    const bool table = view.rank == 2;
    return {
        view.data, view.dtype, view.shape[0], table ? view.shape[1] : 1, view.stride[0], table ? view.stride[1] : 0};
}

void Checks::unused(const char* name, const TensorView& view, const char* why) {
    if (view.given() || view.data != nullptr) bad(name, " is given, but ", why);
}

void Checks::no_overlaps(SamePair in_place) {
    const auto named = [](const Entry& entry, const char* name) { return name && std::strcmp(entry.name, name) == 0; };
    for (int i = 0; ok() && i < count_; ++i) {
        const Entry& a = entries_[i];
        if (a.role == Role::input) continue;
        for (int j = 0; ok() && j < count_; ++j) {
            const Entry& b = entries_[j];
            // Two outputs meet once, an output and an input whichever comes first.
            if (i == j || (b.role != Role::input && j > i)) continue;
            if (!overlap(a.extent, b.extent)) continue;
            const bool pair = (named(a, in_place.first) && named(b, in_place.second)) ||
                              (named(a, in_place.second) && named(b, in_place.first));
            if (pair && same_view(a.extent, b.extent)) continue;
            bad("output ", a.name, " overlaps ", b.role == Role::input ? "input " : "output ", b.name,
                pair ? "; they may be the same view or apart" : "");
        }
    }
}

}  // namespace flashqla
