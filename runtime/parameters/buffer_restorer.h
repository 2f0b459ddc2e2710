// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "graph/content.h"
#include "graph/leaf.h"
#include "runtime/parameters/parameter_table.h"

namespace smp::runtime {

/// Copies of all buffers, and of the parameters that leaves write, put back when it goes: captures
/// are invisible.
struct BufferRestorer {
  explicit BufferRestorer(const ParameterTable& table) {
    for (const auto& entry : table.entries()) {
      if (!entry.is_parameter()) buffers.keep(entry.tensor);
    }
  }

  graph::ContentScope buffers;
  graph::LeafWritesScope written;
};

}  // namespace smp::runtime
