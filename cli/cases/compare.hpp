// How far an output is from the reference, head by head.
#pragma once

#include <string>
#include <vector>

#include "cases/host_tensor.hpp"
#include "cases/tolerance.hpp"

namespace flashqla::cases {

struct HeadError {
    double rel_l2 = 0;  // ||x - ref|| / max(||ref||, floor)
    double max_abs = 0;
    double max_rel = 0;  // over elements that are not small against the head's RMS
    double rms = 0;      // of the reference
    std::string worst;   // coordinate of max_abs, with both values
    std::int64_t elements = 0;
    bool passed = true;
};

struct OutputError {
    std::string name;
    std::vector<HeadError> heads;
    HeadError whole;
    Tolerance tolerance;
    std::vector<std::string> faults;  // NaN or inf where the reference has none, padding rows that are not zero, ...
    bool passed() const;
};

// The reference as plain values in logical order, of the elements that a correct call writes.
struct Reference {
    std::vector<float> values;  // every element of the logical tensor
};

// `is_padding_row(b, t)`: rows of token outputs that must be exactly zero.
OutputError compare(const Case& c, const HostTensor& output, const Reference& reference,
                    const std::vector<bool>& padding_rows);

// Two outputs as plain values, by the same measure but without heads. Empty: equal within `allowed`.
std::string difference(const std::string& what, const std::vector<float>& a, const std::vector<float>& b,
                       double allowed);
// Empty: the same bits.
std::string bit_difference(const std::string& what, const std::vector<float>& a, const std::vector<float>& b);

std::vector<float> values_of(const HostTensor& tensor);

}  // namespace flashqla::cases
