// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

#include "comm/communicator.h"

namespace smp::nn {

/// The calling rank's tensor-parallel group, in which the operators and modules of this folder
/// communicate: that of this thread's `TensorGroupScope`, else what the program's runtime says.
/// Throws `UsageError` without either.
comm::CommunicatorPtr tensor_group();

/// Tells how to find the group of the calling rank; `smp::init` does. It may be called from any
/// rank's thread.
void set_tensor_group(std::function<comm::CommunicatorPtr()> provider);

/// What modules favour whose option `optimize` says nothing, "memory" or "speed": what the
/// program's runtime says, or "memory" without one.
std::string default_optimize();

/// Tells what `default_optimize` returns on the calling rank; `smp::init` does. It may be called
/// from any rank's thread.
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
