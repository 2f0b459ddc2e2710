// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace smp::core {

/// From here on, the memory of tensors on the CPU comes from `malloc`, with some bytes more for
/// each by which it is aligned.
///
/// libtorch asks for aligned memory (`posix_memalign`), for which older versions of glibc (2.36)
/// take a freed block of just that size only if the memory beside it is free, too. So a training
/// step, which allocates as much as the last one has freed, takes new memory where there is enough:
/// up to half as much again as is ever in use. Does nothing where the program has set an allocator
/// of its own, where the environment tunes libtorch's (`THP_MEM_ALLOC_ENABLE`), and under the
/// address sanitizer, which would check less.
void take_tensor_memory_from_malloc();

}  // namespace smp::core
