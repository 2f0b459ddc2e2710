// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

/// Samples of torch's OpInfo and ModuleInfo databases, as write_samples.py writes them.
namespace smp::op_samples {

using Tensors = std::vector<at::Tensor>;

/// One operator call. Arguments are JSON; tensors are numbers of values: first the leaves of the
/// sample, then the results of its calls.
struct Call {
  c10::OperatorHandle op;
  nlohmann::json arguments;  ///< the first ones of the schema, in order
  nlohmann::json keywords;   ///< others by name
};

/// An operator or module of the databases on one set of arguments.
struct Sample {
  std::string name;  ///< "nn.functional.linear float32 0"
  Tensors leaves;    ///< inputs; some require a gradient
  std::vector<Call> calls;
  std::vector<int> outputs;  ///< numbers of values
  bool random = false;       ///< then nothing is expected
  Tensors expected_outputs;
  Tensors expected_gradients;  ///< gradients of `weighted_sum`, by leaf; undefined: none

  /// The operator of the sample: the name without type and number.
  std::string subject() const;
};

/// A sample that Python could not write, or several of the same name.
struct Skipped {
  std::string name;
  std::string reason;
  int samples = 0;
};

/// The samples of NAME.json and NAME.safetensors; `path` ends in ".json". Throws for another kind
/// of file, and for operators that this libtorch does not have.
std::vector<Sample> read_samples(const std::string& path);

/// The entries of skipped.json.
std::vector<Skipped> read_skipped(const std::string& path);

/// Calls the sample's operators through the dispatcher. `inputs` stand for its leaves.
Tensors execute(const Sample& sample, const Tensors& inputs);

/// The same by `run`, which finds a call's arguments on the stack and leaves its results there.
Tensors execute(const Sample& sample, const Tensors& inputs,
                const std::function<void(const Call&, torch::jit::Stack&)>& run);

/// A number of all outputs that require a gradient; undefined if none does. The weights are the
/// same in write_samples.py.
at::Tensor weighted_sum(const Tensors& outputs);

}  // namespace smp::op_samples
