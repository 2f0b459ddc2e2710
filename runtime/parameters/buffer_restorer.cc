// SPDX-License-Identifier: Apache-2.0
#include "runtime/parameters/buffer_restorer.h"

namespace smp::runtime {

BufferRestorer::BufferRestorer(const Runtime& runtime) {
  for (const auto& entry : runtime.table().entries()) {
    if (!entry.is_parameter()) buffers_.keep(entry.tensor);
  }
}

}  // namespace smp::runtime
