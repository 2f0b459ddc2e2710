// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "graph/graph.h"
#include "graph/tensor_table.h"
#include "partitioner/plan.h"
#include "pipeline/generators.h"
#include "tests/random/program.h"

/// A random program run by plain eager libtorch, and by thread ranks that hold a stage each.
namespace smp::random_programs {

/// How a program is run, drawn from its seed.
struct Trial {
  uint64_t seed = 0;
  int microbatches = 1;
  int steps = 1;
  uint64_t schedule = 0;  ///< which of those that fit the stages
  int active_microbatches = 1;
  bool shapes_only = false;     ///< captured without data
  bool numbers_change = false;  ///< after the first capture, which later runs are compared with
  bool leaves = false;          ///< the first capture goes another way from some instruction on

  static Trial of(uint64_t seed);
};

/// Everything a run leaves, by its kind ("output 1 of microbatch 0 of step 0"). A parameter that
/// got no gradient has none.
using Outcome = std::map<std::string, at::Tensor>;

/// The first difference in bits, as text; empty if there is none. Any NaN equals any NaN.
std::string difference(const Outcome& got, const Outcome& expected);

/// Adds the outcome of a rank. A difference from earlier ranks is an entry of its own.
void merge(Outcome& all, const Outcome& of_a_rank);

/// True if some floating tensor holds infinities or NaN.
bool has_non_finite(const Outcome& outcome);

/// Tensors that outlive a step: parameters, buffers and constants of one process.
class State {
 public:
  explicit State(const Program& program);

  /// All leaves for a microbatch; inputs are made anew.
  Tensors leaves(int step, int microbatch) const;
  const graph::TensorTable& table() const { return table_; }

 private:
  const Program& program_;
  Tensors kept_;  ///< tensors by leaf; undefined for inputs
  graph::TensorTable table_;
};

/// Microbatch by microbatch in one process, with autograd; gradients summed raw. Throws libtorch's
/// errors for programs that it cannot differentiate.
Outcome run_eager(const Program& program, const Trial& trial);

/// The graph of the program.
std::unique_ptr<graph::Graph> capture(const Program& program, const Trial& trial);

/// The difference of another run of the program from its own graph; empty if the guard sees none.
std::string guard(const Program& program, const Trial& trial, const graph::Graph& graph);

/// The schedule in which the plan is run.
const pipeline::ScheduleKind& schedule_of(const Trial& trial, const graph::Graph& graph,
                                          const partitioner::Plan& plan);

/// Runs the plan over as many thread ranks as it names. The stages replay `graph`.
Outcome run_pipeline(const Program& program, const Trial& trial, const graph::Graph& graph,
                     const partitioner::Plan& plan);

}  // namespace smp::random_programs
