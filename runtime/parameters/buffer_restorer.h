#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "graph/leaf.h"
#include "runtime/runtime.h"

namespace smp::runtime {

/// Copies of all buffers, and of the parameters that leaves write, put back when it goes: captures
/// are invisible.
class BufferRestorer {
 public:
  explicit BufferRestorer(const Runtime& runtime);
  ~BufferRestorer();
  BufferRestorer(const BufferRestorer&) = delete;
  BufferRestorer& operator=(const BufferRestorer&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> saved_;  // buffer and copy
  graph::LeafWritesScope written_;
};

}  // namespace smp::runtime
