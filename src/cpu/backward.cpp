#include "cpu/dispatch.hpp"
namespace flashqla::cpu { void add_backward(Kernels&, std::int64_t) {} }
