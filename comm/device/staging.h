// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "smp/work.h"

/// Host memory in place of a device's.
namespace smp::comm {

/// A copy in host memory. Waits until the device has made `tensor`.
at::Tensor staged_copy(const at::Tensor& tensor);

/// Host memory for such a copy, with undefined content.
at::Tensor staging_room(const at::Tensor& tensor);

/// An operation on `staged`. When it is waited for, `staged` is copied to `result`, if that is
/// defined.
WorkPtr staged_work(WorkPtr work, const at::Tensor& staged, const at::Tensor& result);

}  // namespace smp::comm
