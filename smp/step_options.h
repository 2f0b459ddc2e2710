// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace smp {

/// Options of a step function.
struct StepOptions {
  /// Axes by the position of an argument. TORCH_ARG makes the following lines private, so this is
  /// first.
  using Axes = std::map<int, int64_t>;

  /// Names the step function in errors and reports, in checkpoints, and in the keys of its random
  /// streams: with a name, dropout draws the same masks whatever other step functions the program
  /// makes. No two have the same name at a time. By default "step 0", "step 1" ... in the order in
  /// which those without a name are made.
  TORCH_ARG(std::string, name) = "";
  /// Number of microbatches of this step function; 0: the configuration's `microbatches`. A batch
  /// that it does not divide is cut into the next smaller number that does.
  TORCH_ARG(int64_t, microbatches) = 0;
  /// Positions of arguments whose tensors every microbatch gets whole, as those that are passed by
  /// `smp::whole`. C++ has no names for arguments, so they are counted from 0.
  TORCH_ARG(std::vector<int>, non_split_inputs) = {};
  /// Position of an argument -> the axis its tensors are cut along, where that is not 0; negative
  /// ones count from the end.
  TORCH_ARG(Axes, input_split_axes) = {};
  /// False: returned tensors keep their autograd history on the rank that computed them.
  TORCH_ARG(bool, detach_outputs) = true;
  /// False: a returned tensor of more than one element is only on the rank that computed it, the
  /// last one of the pipeline as a rule, and undefined on the others. Numbers, such as losses, are
  /// on all ranks always. The same on all ranks of a pipeline.
  TORCH_ARG(bool, share_outputs) = true;
};

}  // namespace smp
