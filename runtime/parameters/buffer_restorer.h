// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "graph/content.h"
#include "graph/leaf.h"
#include "runtime/parameters/parameter_table.h"

namespace smp::runtime {

/// Copies of all buffers, and of the parameters that leaves write, put back when it goes: captures
/// are invisible.
class BufferRestorer {
 public:
  explicit BufferRestorer(const ParameterTable& table);

 private:
  graph::ContentScope buffers_;
  graph::LeafWritesScope written_;
};

}  // namespace smp::runtime
