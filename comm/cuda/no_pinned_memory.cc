// SPDX-License-Identifier: Apache-2.0
// What a build without --config=cuda has in place of pinned_memory.cc.

#include "comm/cuda/pinned_memory.h"

namespace smp::comm {

bool pin_memory(void* /*memory*/, size_t /*bytes*/, int /*index*/) { return false; }

void unpin_memory(void* /*memory*/) {}

}  // namespace smp::comm
