// SPDX-License-Identifier: Apache-2.0
// Replaces pinned_memory.cc in a build without --config=cuda.

#include "comm/cuda/pinned_memory.h"

namespace smp::comm {

bool pin_memory(void* /*memory*/, size_t /*bytes*/, int /*index*/) { return false; }

void unpin_memory(void* /*memory*/) {}

}  // namespace smp::comm
