// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "smp/work.h"

/// Host memory in place of a device's: pinned, so that a device copies without help of the
/// processor, and the host waits for nothing that comes back. When it is freed libtorch keeps it
/// until these copies are done.
namespace smp::comm {

/// A copy in host memory. Waits until the device has made `tensor`, on the current stream.
at::Tensor staged_copy(const at::Tensor& tensor);

/// Host memory for such a copy, with undefined content.
at::Tensor staging_room(const at::Tensor& tensor);

/// Gives the current stream a copy of `staged` to `result`, which is contiguous.
void copy_staged(const at::Tensor& staged, const at::Tensor& result);

/// An operation on `staged`. When it is waited for, that is copied to `result`, if it is defined.
WorkPtr staged_work(WorkPtr work, const at::Tensor& staged, const at::Tensor& result);

}  // namespace smp::comm
