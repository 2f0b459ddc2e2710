#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "graph/coalesce.h"
#include "graph/tracer.h"
#include "smp/program.h"
#include "smp/runtime.h"

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
class StepCore {
 public:
  explicit StepCore(StepOptions options);

  /// Collective over the ranks (each replica its own pipeline).
  StepResults run(const StepCall& call);

  int64_t microbatches() const;
  const std::string& name() const { return name_; }
  /// False if the configuration's `guard` lets some calls pass without running the function.
  bool guards_every_step() const { return guard_period_ == 1; }

 private:
  /// What the guard found, to be compared between the ranks of a pipeline.
  struct Traced {
    std::shared_ptr<graph::Graph> found;
    std::vector<std::vector<graph::ConstantOverride>> constants;  // by microbatch, or one
    std::vector<std::vector<graph::ContentOverride>> contents;
    bool is_new = false;
    std::vector<uint64_t> checksums;
  };

  /// What runs a graph, perhaps several microbatches as one.
  struct Prepared {
    std::shared_ptr<const graph::Coalesced> coalesced;  // null: as captured
    std::unique_ptr<Program> program;
  };

  StepResults run_checked(const StepCall& call);
  bool guard_is_due(const StepCall& call, const std::vector<at::Tensor>& inputs) const;
  Traced guard(const StepCall& call, const std::vector<std::vector<at::Tensor>>& inputs);
  std::vector<std::vector<at::Tensor>> split(const StepCall& call, int64_t count) const;
  void check_inputs(const StepCall& call) const;
  Traced trace(const StepCall& call, const std::vector<std::vector<at::Tensor>>& inputs);
  graph::TraceResult trace_one(const StepCall& call, int microbatch,
                               const std::vector<at::Tensor>& inputs, bool execute);
  void agree(const Traced& traced, const StepCall& call);
  const std::array<uint64_t, 2>& fingerprints(const graph::Graph& graph);
  std::shared_ptr<graph::Graph> use(const graph::Graph* graph);
  void forget_oldest();
  Prepared& prepare(const Traced& traced, const StepCall& call,
                    const std::vector<std::vector<at::Tensor>>& inputs);
  std::shared_ptr<const graph::Coalesced> coalesce(const Traced& traced, const StepCall& call,
                                                   bool measured);
  Program::Inputs inputs_of(const Prepared& prepared, const StepCall& call, Traced traced,
                            std::vector<std::vector<at::Tensor>> inputs) const;

  std::shared_ptr<Runtime> runtime_;
  StepOptions options_;
  int ordinal_;
  std::string name_;
  int64_t guard_period_;  // every how many calls the function runs; 0: in the first only
  // What the last guarded call found, and for inputs of which shapes; kept unless all are guarded.
  std::optional<Traced> last_;
  std::vector<graph::TensorMeta> last_inputs_;
  std::vector<std::shared_ptr<graph::Graph>> graphs_;  // last used last
  std::map<std::pair<const graph::Graph*, int64_t>, Prepared> programs_;
  std::map<const graph::Graph*, std::array<uint64_t, 2>> fingerprints_;  // graph, constants
};

}  // namespace smp
