#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "runtime/runtime.h"

namespace smp::runtime {

/// Copies of all buffers, put back when it goes: captures are invisible.
class BufferRestorer {
 public:
  explicit BufferRestorer(const Runtime& runtime);
  ~BufferRestorer();
  BufferRestorer(const BufferRestorer&) = delete;
  BufferRestorer& operator=(const BufferRestorer&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> saved_;  // buffer and copy
};

}  // namespace smp::runtime
