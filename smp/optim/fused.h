// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "smp/export.h"

namespace smp::optim {

// libtorch's optimizers with its own fused kernels, which C++ programs cannot ask for (`fused=True`
// in Python): one pass over parameter, gradient and state instead of one for each operator of the
// formula. Options, state and checkpoints are those of the class they derive from, so that one may
// go on where the other stopped. The formula is the same, rounded in other places: updates agree up
// to some units in the last place, not to the bit.
//
// The class they derive from updates the parameters that the kernels do not take: those that are
// not floating point or not dense, and those with a sparse gradient.

/// torch::optim::SGD, fused.
class SMP_API FusedSGD : public torch::optim::SGD {
 public:
  using SGD::SGD;
  torch::Tensor step(LossClosure closure = nullptr) override;
};

/// torch::optim::Adam, fused.
class SMP_API FusedAdam : public torch::optim::Adam {
 public:
  using Adam::Adam;
  torch::Tensor step(LossClosure closure = nullptr) override;
};

/// torch::optim::AdamW, fused.
class SMP_API FusedAdamW : public torch::optim::AdamW {
 public:
  using AdamW::AdamW;
  torch::Tensor step(LossClosure closure = nullptr) override;
};

/// torch::optim::Adagrad, fused. Takes param groups that are added later, too.
class SMP_API FusedAdagrad : public torch::optim::Adagrad {
 public:
  using Adagrad::Adagrad;
  torch::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace smp::optim
