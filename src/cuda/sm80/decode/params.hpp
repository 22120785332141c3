// One token for each row: the shapes and layouts that serving uses, at the speed of memory. Whatever does not fit is
// done by the recurrent kernel.
#pragma once

#include <cstdint>

#include "base/call.hpp"
#include "cuda/device/divide.cuh"
#include "cuda/host/launch.hpp"

namespace flashqla::cuda::sm80 {

// A block computes one (row, value head, strip of V columns); strips are fastest.
struct DecodeGrid {
    Divider strips, heads;
    Divider keys;             // interleaved grouping: value heads of a key head; tiled: key heads
    bool plain_rows = false;  // row n reads and writes slot n: no index tensor is asked
};

// Whether there is a kernel for a problem's sizes.
bool has_decode_kernel(const Problem& problem) noexcept;

// Whether launch_decode can do a call. It depends on what a plan does not know: the type and alignment of tensors.
bool decode_fits(const DecodeCall& call) noexcept;

// NOTE: for calls that fit.
Status launch_decode(const DecodeCall& call, int device, Stream stream) noexcept;

// Its two halves, compiled apart.
Status launch_decode_vk(const LaunchSite& site, const DecodeCall& call) noexcept;
Status launch_decode_kv(const LaunchSite& site, const DecodeCall& call) noexcept;

}  // namespace flashqla::cuda::sm80
