// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "nn/rewrite/call.h"

namespace smp::nn::rewrite {

/// The tensors of the forward pass that an operator's backward pass needs, by the kind of operator.
/// An estimate: libtorch decides.
struct SavedForBackward {
  std::vector<int> arguments;  ///< positions among `Call::tensors`
  std::vector<int> results;    ///< positions among `Call::results`
  bool mask = false;           ///< a tensor of the result's size that only the operator sees
};

/// Nothing for an operator without a gradient.
SavedForBackward saved_by(const Call& call);

}  // namespace smp::nn::rewrite
