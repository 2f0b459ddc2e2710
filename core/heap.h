// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace smp::core {

/// Lets the C library keep freed memory of this process for later allocations.
///
/// Every step frees memory that the next one allocates again. By default glibc returns memory at
/// the end of the heap to the system whenever it exceeds a small limit, and gets it back page by
/// page with a fault for each: thousands a step (see mallopt(3), M_TRIM_THRESHOLD). Does nothing
/// where the environment tunes the allocator (`MALLOC_...`, `GLIBC_TUNABLES`) or the C library is
/// not glibc.
void keep_freed_memory();

/// Gives the memory that is free now back to the system, once. Another thread that is at it does
/// that instead, when it has ended. Does nothing if the C library is not glibc.
void return_freed_memory();

/// Gives back the scratch memory that MKL keeps of the calling thread's matrix products.
///
/// It keeps some for each size of product that the thread has had (`mkl_thread_free_buffers` in its
/// manual), 20 MiB after thirty sizes of batches, and does not need it again for others. Does
/// nothing where libtorch is built without MKL.
void return_scratch_memory();

}  // namespace smp::core
