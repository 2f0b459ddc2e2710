#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace smp {

/// Options of a step function.
struct StepOptions {
  /// What errors and reports call it; by default "step 0", "step 1" ... in the order of creation.
  TORCH_ARG(std::string, name) = "";
  /// How many microbatches this step function cuts its inputs into; 0: the configuration's
  /// `microbatches`.
  TORCH_ARG(int64_t, microbatches) = 0;
  /// Positions of arguments whose tensors every microbatch gets whole. C++ has no names for
  /// arguments, so they are counted from 0.
  TORCH_ARG(std::vector<int>, non_split_inputs) = {};
  /// Position of an argument -> the axis its tensors are cut along, where that is not 0; negative
  /// ones count from the end.
  using Axes = std::map<int, int64_t>;
  TORCH_ARG(Axes, input_split_axes) = {};
  /// False: returned tensors keep their autograd history on the rank that computed them.
  TORCH_ARG(bool, detach_outputs) = true;
};

/// One call of a step function, with types erased. Internal: see `Step`.
struct StepCall {
  /// The tensors found in the arguments, in order, each with the axis to cut (from the end if
  /// negative), or nothing for whole.
  std::vector<at::Tensor> tensors;
  std::vector<std::optional<int64_t>> axes;
  /// An argument slices itself (`smp_slice`), so microbatches may differ in more than tensors.
  bool per_microbatch = false;
  /// What `function` returned in the last guarded call is known, so that it need not run again.
  bool has_last_result = false;
  /// Calls the user's function with these tensors in place of the arguments' and returns the
  /// tensors found in its result.
  std::function<std::vector<at::Tensor>(int microbatch, const std::vector<at::Tensor>&)> function;
};

/// Returned tensors by position and microbatch.
using StepResults = std::vector<std::vector<at::Tensor>>;

/// Runs a step function: guards it, captures and partitions where needed, executes its pipeline.
/// Its parts are declared in the source, so that user code compiles without the engine's headers.
class StepCore {
 public:
  explicit StepCore(StepOptions options);
  ~StepCore();

  /// Collective over the ranks (each replica its own pipeline).
  StepResults run(const StepCall& call);

  int64_t microbatches() const;
  const std::string& name() const;
  /// False if the configuration's `guard` lets some calls pass without running the function.
  bool guards_every_step() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace smp
