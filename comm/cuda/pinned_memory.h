// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace smp::comm {

/// Locks host memory into place and tells the GPUs of this process, which then copy to and from it
/// without help of the processor. GPU `index` does it: no other is woken for it. False where that
/// is not possible; the memory can be used all the same, at about a third of the speed. In a build
/// without --config=cuda it never is.
bool pin_memory(void* memory, size_t bytes, int index);

/// Must be called before memory that was pinned is unmapped.
void unpin_memory(void* memory);

}  // namespace smp::comm
