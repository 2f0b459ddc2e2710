#include "runtime/parameters/buffer_restorer.h"

#include <ATen/core/grad_mode.h>

namespace smp::runtime {

BufferRestorer::BufferRestorer(const Runtime& runtime) {
  at::NoGradGuard no_grad;
  for (const auto& entry : runtime.table().entries()) {
    if (entry.is_parameter()) continue;
    saved_.emplace_back(entry.tensor, entry.tensor.detach().clone());
  }
}

BufferRestorer::~BufferRestorer() {
  at::NoGradGuard no_grad;
  for (auto& [buffer, copy] : saved_) {
    // What `forward` wrote into it left a history; detach_() would refuse views.
    if (buffer.requires_grad()) buffer.unsafeGetTensorImpl()->set_autograd_meta(nullptr);
    buffer.copy_(copy);
  }
}

}  // namespace smp::runtime
