// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace smp::graph {

/// The module that runs, as code on this thread says it that knows. Elsewhere the capture takes
/// the module of the parameter that was read last.
struct RunningModule {
  std::string path;  ///< dotted, from the module that `parameter_name` starts from
  /// A parameter or buffer of that module, whose name in the model says where the module is.
  at::Tensor parameter;
  std::string parameter_name;
};

/// The module of this thread's innermost `ModuleScope`; null outside of all.
const RunningModule* running_module();

/// Operators called on this thread while it lives are recorded as those of `module`, which has to
/// live as long; an inner scope wins.
class ModuleScope {
 public:
  explicit ModuleScope(const RunningModule& module);
  ~ModuleScope();
  ModuleScope(const ModuleScope&) = delete;
  ModuleScope& operator=(const ModuleScope&) = delete;

 private:
  const RunningModule* outer_;
};

}  // namespace smp::graph
