// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>

#include "smp/export.h"
#include "smp/nn/parameter_split.h"

namespace smp::nn {

/// Base, beside `torch::nn::Module`, of a module some of whose own parameters hold this rank's part
/// only. The runtime asks it: divided parameters are reduced, saved, loaded and counted in norms as
/// one logical tensor. Belongs to the module's thread.
class SMP_API SplitModule {
 public:
  virtual ~SplitModule() = default;

  /// The divided ones of the module's own parameters (not of its submodules'), by the name that
  /// they are registered with.
  virtual std::map<std::string, ParameterSplit> split_parameters() const = 0;
};

}  // namespace smp::nn
