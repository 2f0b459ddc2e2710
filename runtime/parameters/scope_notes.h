// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "runtime/parameters/tensor_notes.h"
#include "smp/tensor_parallelism_options.h"

namespace smp::runtime {

// Notes of all threads: they follow the model, which may be made on another one than that of its
// steps.

/// Where `smp::partition` and `smp::set_partition` pinned tensors.
TensorNotes<int>& partition_pins();

/// The partition that a tensor is pinned to; -1: none.
int pinned_partition(const at::Tensor& tensor);

/// The setting of `smp::tensor_parallelism` and `smp::set_tensor_parallelism` for parameters.
struct TensorParallelismMark {
  bool enabled;
  TensorParallelismOptions options;
};
TensorNotes<TensorParallelismMark>& tensor_parallelism_marks();

}  // namespace smp::runtime
