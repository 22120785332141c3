#include "cases/compare.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

#include "cases/numbers.hpp"

namespace flashqla::cases {
namespace {

std::string number(double x) {
    char text[32];
    std::snprintf(text, sizeof text, "%.6g", x);
    return text;
}

std::string coordinate(const std::int64_t* index, int rank) {
    std::string text = "[";
    for (int i = 0; i < rank; ++i) {
        if (i > 0) text += ',';
        text += std::to_string(index[i]);
    }
    text += ']';
    return text;
}

struct Sums {
    double error = 0, reference = 0;
    std::int64_t live = 0;  // elements that are not zero: padding averages nothing out
};

}  // namespace

bool OutputError::passed() const {
    return faults.empty() && whole.passed &&
           std::all_of(heads.begin(), heads.end(), [](const HeadError& h) { return h.passed; });
}

OutputError compare(const Case& c, const HostTensor& output, const Reference& reference,
                    const std::vector<bool>& padding_rows) {
    OutputError result;
    result.name = output.name;
    const TensorView& view = output.view;
    const auto heads = static_cast<std::size_t>(view.shape[static_cast<std::size_t>(output.head_axis)]);
    result.heads.resize(heads);
    std::vector<Sums> sums(heads);
    std::size_t position = 0;
    std::size_t wrong_kind = 0, poison = 0, not_zero = 0;
    std::string first_wrong, first_poison, first_not_zero;
    const std::int64_t first = output.first_element();
    for_each(view, [&](const std::int64_t* index, std::int64_t offset) {
        const double ref = reference.values[position++];
        if (!output.storage->allowed(first + offset)) return;
        const double x = load(view.data, view.dtype, offset);
        const auto h = static_cast<std::size_t>(index[output.head_axis]);
        HeadError& head = result.heads[h];
        ++head.elements;
        const auto tell = [&] {
            return output.name + coordinate(index, view.rank) + " is " + number(x) + ", the oracle has " + number(ref);
        };
        if (output.by_token && padding_rows[static_cast<std::size_t>(index[0] * view.shape[1] + index[1])] && x != 0) {
            if (not_zero++ == 0) first_not_zero = tell() + " in a padding row, which must be zero";
            return;
        }
        if (std::isnan(ref) || std::isnan(x)) {
            if (poison++ == 0) first_poison = tell();
            return;
        }
        // What the stored format makes of the reference: f16 saturates to infinity.
        const double stored = rounded(ref, view.dtype);
        if (std::isinf(x) || std::isinf(stored)) {
            const bool at_the_edge =
                std::abs(ref) > 0.99 * 65504.0 && view.dtype == DType::f16 && std::isinf(x) != std::isinf(stored);
            if (x != stored && !at_the_edge && wrong_kind++ == 0) first_wrong = tell();
            return;
        }
        const double error = std::abs(x - ref);
        sums[h].error += error * error;
        sums[h].reference += ref * ref;
        if (ref != 0) ++sums[h].live;
        if (error > head.max_abs || head.worst.empty()) {
            head.max_abs = error;
            head.worst = coordinate(index, view.rank) + " " + number(x) + " against " + number(ref);
        }
    });
    const auto fault = [&](std::size_t count, const std::string& sentence) {
        if (count > 0) result.faults.push_back(sentence + " (" + std::to_string(count) + " such elements)");
    };
    fault(not_zero, first_not_zero);
    fault(poison, first_poison);
    fault(wrong_kind, first_wrong);

    Sums total;
    HeadError& whole = result.whole;
    for (std::size_t h = 0; h < heads; ++h) {
        const HeadError& head = result.heads[h];
        total.error += sums[h].error;
        total.reference += sums[h].reference;
        total.live += sums[h].live;
        whole.elements += head.elements;
        if (head.max_abs > whole.max_abs || whole.worst.empty()) {
            whole.max_abs = head.max_abs;
            whole.worst = head.worst;
        }
    }
    const auto per_head = heads ? total.live / static_cast<std::int64_t>(heads) : 0;
    result.tolerance = tolerance(c, output.name, view.dtype, per_head);
    const Tolerance& t = result.tolerance;
    const double whole_rms = whole.elements ? std::sqrt(total.reference / static_cast<double>(whole.elements)) : 0;
    const auto judge = [&](HeadError& head, const Sums& s, double allowed, double floor_rms) {
        const double n = std::sqrt(static_cast<double>(std::max<std::int64_t>(head.elements, 1)));
        const double norm = std::max(std::sqrt(s.reference), floor_rms * n);
        const double error = std::sqrt(s.error);
        head.rms = std::sqrt(s.reference) / n;
        head.rel_l2 = norm > 0 ? error / norm : error > 0 ? std::numeric_limits<double>::infinity() : 0;
        head.passed = error <= allowed * norm + t.absolute * n;
    };
    for (std::size_t h = 0; h < heads; ++h) judge(result.heads[h], sums[h], t.per_head, t.floor * whole_rms);
    judge(whole, total, t.whole, 0);

    position = 0;
    for_each(view, [&](const std::int64_t* index, std::int64_t offset) {
        const double ref = reference.values[position++];
        if (!output.storage->allowed(first + offset) || !std::isfinite(ref)) return;
        const double x = load(view.data, view.dtype, offset);
        HeadError& head = result.heads[static_cast<std::size_t>(index[output.head_axis])];
        if (std::isfinite(x) && std::abs(ref) > 0.1 * head.rms) {
            head.max_rel = std::max(head.max_rel, std::abs(x - ref) / std::abs(ref));
        }
    });
    for (const HeadError& head : result.heads) whole.max_rel = std::max(whole.max_rel, head.max_rel);
    return result;
}

std::string difference(const std::string& what, const std::vector<float>& a, const std::vector<float>& b,
                       double allowed) {
    if (a.size() != b.size()) return what + ": the sizes differ";
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        if (std::isnan(a[i]) || std::isnan(b[i])) return what + ": NaN at element " + std::to_string(i);
        const double d = static_cast<double>(a[i]) - b[i];
        error += d * d;
        norm += static_cast<double>(b[i]) * b[i];
    }
    if (std::sqrt(error) <= allowed * std::sqrt(norm)) return "";
    return what + ": relative L2 difference " + number(std::sqrt(error / norm)) + ", allowed is " + number(allowed);
}

std::string bit_difference(const std::string& what, const std::vector<float>& a, const std::vector<float>& b) {
    if (a.size() != b.size()) return what + ": the sizes differ";
    std::size_t count = 0, where = 0;
    for (std::size_t i = a.size(); i-- > 0;) {
        if (std::memcmp(&a[i], &b[i], sizeof a[i]) != 0) {
            ++count;
            where = i;
        }
    }
    if (count == 0) return "";
    return what + ": " + std::to_string(count) + " of " + std::to_string(a.size()) +
           " elements differ in bits, first " + std::to_string(where) + " (" + number(a[where]) + " against " +
           number(b[where]) + ")";
}

std::vector<float> values_of(const HostTensor& tensor) {
    std::vector<float> values;
    values.reserve(static_cast<std::size_t>(tensor.size()));
    for_each(tensor.view, [&](const std::int64_t*, std::int64_t offset) {
        values.push_back(static_cast<float>(load(tensor.view.data, tensor.view.dtype, offset)));
    });
    return values;
}

}  // namespace flashqla::cases
