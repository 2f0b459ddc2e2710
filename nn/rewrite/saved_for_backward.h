// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "nn/rewrite/call.h"

namespace smp::nn::rewrite {

/// What the backward pass of an operator needs of its forward pass, by what the operator is. An
/// estimate: libtorch decides.
struct SavedForBackward {
  std::vector<int> arguments;  ///< positions among `Call::tensors`
  std::vector<int> results;    ///< positions among `Call::results`
  bool mask = false;           ///< a tensor of the result's size that nobody else sees
};

/// Nothing for an operator without a gradient.
SavedForBackward saved_by(const Call& call);

}  // namespace smp::nn::rewrite
