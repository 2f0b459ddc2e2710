// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/pimpl.h>

#include <string>
#include <vector>

#include "smp/exported.h"
#include "tools/train/options.h"

namespace smp::tools::train {

/// One of `--inputs`: the argument of the model, or empty for the next one, and the tensor of the
/// data.
struct InputName {
  std::string argument;
  std::string tensor;
};

/// The names of `--inputs`.
std::vector<InputName> read_inputs(const std::vector<std::string>& inputs);

/// The loaded programs as a module that takes the inputs of a batch, in the order of `--inputs`,
/// and returns the tensor for the loss. Its parameters have the names that they have in Python.
class NetworkImpl : public ExportedModuleImpl {
 public:
  explicit NetworkImpl(const Options& options);

  at::Tensor forward(const std::vector<at::Tensor>& inputs);

 private:
  const std::vector<InputName> inputs_;
  const std::string output_;
};
TORCH_MODULE(Network);

}  // namespace smp::tools::train
