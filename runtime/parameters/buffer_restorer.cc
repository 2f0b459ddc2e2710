// SPDX-License-Identifier: Apache-2.0
#include "runtime/parameters/buffer_restorer.h"

namespace smp::runtime {

BufferRestorer::BufferRestorer(const ParameterTable& table) {
  for (const auto& entry : table.entries()) {
    if (!entry.is_parameter()) buffers_.keep(entry.tensor);
  }
}

}  // namespace smp::runtime
