// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

#include "comm/communicator.h"

namespace smp::nn {

/// The calling rank's tensor-parallel group, in which the operators and modules of this folder
/// communicate: that of this thread's `TensorGroupScope`, else that of the program's runtime.
/// Throws `UsageError` without either.
comm::CommunicatorPtr tensor_group();

/// Tells how to find the group of the calling rank; `smp::init` does. It may be called from any
/// rank's thread.
void set_tensor_group(std::function<comm::CommunicatorPtr()> provider);

/// The preference, "memory" or "speed", of modules whose option `optimize` is not set: the
/// runtime's, or "memory" without one.
std::string default_optimize();

/// Sets the function that gives `default_optimize` on the calling rank; `smp::init` does. It may be
/// called from any rank's thread.
void set_default_optimize(std::function<std::string()> provider);

/// The tensor-parallel group of this thread until the end of the block, whatever the runtime says.
class TensorGroupScope {
 public:
  explicit TensorGroupScope(comm::CommunicatorPtr group);
  ~TensorGroupScope();
  TensorGroupScope(const TensorGroupScope&) = delete;
  TensorGroupScope& operator=(const TensorGroupScope&) = delete;

 private:
  comm::CommunicatorPtr before_;
};

}  // namespace smp::nn
