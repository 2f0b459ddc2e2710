// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "comm/channel.h"

namespace smp::comm {

/// Length of the longest part behind the first bytes of a channel's messages.
inline int64_t element_bytes(const ChannelSpec& spec) { return spec.bytes - spec.host_bytes; }

/// The part of a channel's messages that goes through the host: the first bytes where the rest
/// moves on the device, otherwise all.
inline ChannelSpec host_part(ChannelSpec spec) {
  if (moves_on_device(spec)) {
    spec.bytes = spec.host_bytes;
    spec.device = at::kCPU;
  }
  return spec;
}

}  // namespace smp::comm
