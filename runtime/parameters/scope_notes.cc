// SPDX-License-Identifier: Apache-2.0
#include "runtime/parameters/scope_notes.h"

namespace smp::runtime {

TensorNotes<int>& partition_pins() {
  static TensorNotes<int> pins;
  return pins;
}

int pinned_partition(const at::Tensor& tensor) {
  return partition_pins().find(tensor).value_or(-1);
}

TensorNotes<TensorParallelismMark>& tensor_parallelism_marks() {
  static TensorNotes<TensorParallelismMark> marks;
  return marks;
}

}  // namespace smp::runtime
