// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "graph/graph_map.h"
#include "graph/random.h"
#include "graph/trace.h"
#include "runtime/runtime.h"
#include "runtime/step/agreement.h"
#include "runtime/step/coalescing.h"
#include "runtime/step/step_program.h"
#include "smp/detail/step_call.h"
#include "smp/step_options.h"

namespace smp::runtime {

using detail::StepCall;
using detail::StepResults;

/// Runs a step function: guards it, captures and partitions where needed, executes its pipeline.
class StepFunction {
 public:
  explicit StepFunction(StepOptions options);
  ~StepFunction();
  StepFunction(const StepFunction&) = delete;
  StepFunction& operator=(const StepFunction&) = delete;

  /// Collective over the ranks (each replica its own pipeline).
  StepResults run(const StepCall& call);

  /// Throws `UsageError` where the options name an argument that a call with `count` does not have.
  void check_positions(int count) const;

  /// The most microbatches of a call, and into how many the tensors of one are cut.
  int64_t microbatches() const;
  int64_t count_microbatches(const StepCall& call) const;
  const std::string& name() const { return name_; }
  /// Describes the program of the last call, see `StepProgram::describe`; empty before.
  std::string describe_program() const { return last_program_ ? last_program_->describe() : ""; }
  /// False if the configuration's `guard` lets some calls pass without running the function.
  bool guards_every_step() const { return guard_period_ == 1; }

 private:
  /// The findings of the guard, to be compared between the ranks of a pipeline.
  struct Traced {
    std::shared_ptr<graph::Graph> found;
    std::vector<std::vector<graph::ConstantOverride>> constants;  // constants by microbatch, or one
    std::vector<std::vector<graph::ContentOverride>> contents;
    bool is_new = false;
    std::vector<uint64_t> checksums;
  };

  /// The program that runs a graph, and how its own graph came from that.
  struct Prepared {
    graph::GraphMap map;
    std::shared_ptr<StepProgram> program;
  };

  /// The batches that a rank runs: its own, or those of its tensor-parallel group in the order of
  /// the ranks.
  using Batches = std::vector<StepCall>;

  StepResults run_checked(const StepCall& given);
  StepCall from_source(StepCall call) const;
  Batches exchange(StepCall call) const;
  int64_t microbatches_run(const StepCall& call) const {
    return call.microbatches * runtime_->batches();
  }
  int64_t microbatch_unit() const;
  /// A number that no microbatch has, for runs of the function whose results are not the user's.
  int no_microbatch() const { return static_cast<int>(microbatches()); }
  bool runs_each_microbatch(const StepCall& call) const {
    return call.per_microbatch || guards_every_microbatch_;
  }
  bool guard_is_due(const StepCall& call, const std::vector<at::Tensor>& inputs) const;
  Traced guard(const StepCall& call, const std::vector<std::vector<at::Tensor>>& inputs);
  std::vector<std::vector<at::Tensor>> split(const Batches& batches, int64_t count) const;
  void check_inputs(const StepCall& call) const;
  void check_one_batch(const StepCall& call) const;
  void check_written_inputs(const StepCall& call, const graph::Graph& graph) const;
  bool captures_on_data() const;
  Traced trace(const StepCall& call, const std::vector<std::vector<at::Tensor>>& inputs);
  graph::TraceResult trace_one(const StepCall& call, int microbatch,
                               const std::vector<at::Tensor>& inputs, bool execute);
  void check_no_state(const StepCall& call, const std::vector<std::vector<at::Tensor>>& inputs);
  void keep_constants(const graph::TraceResult& run);
  void agree(const Traced& traced, const Batches& batches);
  graph::RandomKey random_key() const;
  std::shared_ptr<graph::Graph> use(const graph::Graph* graph);
  void forget_oldest();
  Prepared& prepare(const Traced& traced, const StepCall& call,
                    const std::vector<std::vector<at::Tensor>>& inputs);
  CoalescingChoice coalesce(const Traced& traced, const StepCall& call, bool measured);
  bool move_in(Batches& batches, const StepProgram& program) const;
  StepProgram::Inputs inputs_of(const Prepared& prepared, Batches& batches, Traced traced,
                                std::vector<std::vector<at::Tensor>> inputs) const;
  StepResults own_outputs(StepResults outputs, int64_t microbatches) const;

  std::shared_ptr<Runtime> runtime_;
  StepOptions options_;
  std::string name_;
  uint64_t stream_;       // number of its random stream
  int64_t guard_period_;  // every how many calls the function runs; 0: in the first only
  bool guards_every_microbatch_;
  // The findings of the last guarded call, and the shapes of its inputs; kept unless all are
  // guarded.
  std::optional<Traced> last_;
  std::vector<graph::TensorMeta> last_inputs_;
  std::vector<int> last_places_;
  int64_t last_microbatches_ = 0;
  std::shared_ptr<StepProgram> last_program_;          // program of the last call
  std::vector<std::shared_ptr<graph::Graph>> graphs_;  // last used last
  std::map<std::pair<const graph::Graph*, int64_t>, Prepared> programs_;
  std::map<const graph::Graph*, StepFingerprints> fingerprints_;
  std::set<int64_t> told_;  // numbers of microbatches that the log has named
};

}  // namespace smp::runtime
