// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "comm/communicator.h"
#include "graph/graph.h"
#include "partitioner/plan.h"
#include "pipeline/message.h"
#include "pipeline/stage.h"

namespace smp::pipeline {

/// The outputs of one stage, which go to all ranks of the pipeline in one message.
class SharedOutputs {
 public:
  /// `positions`: those of the graph's outputs that the stage has.
  SharedOutputs(const graph::Graph& graph, std::vector<int> positions, int microbatches);

  int64_t nbytes() const { return layout_.nbytes(); }

  /// Adds them to the results of a step on all ranks but `rank`, which has them there. Collective.
  /// Elements on devices stay there where devices can send them.
  void share(comm::Communicator& pipeline, int rank, StepResults& results) const;

 private:
  std::vector<at::Tensor> in_order(const StepResults& results) const;

  std::vector<int> positions_;
  int microbatches_;
  MessageLayout layout_;  // outputs by position, then by microbatch
};

/// The outputs by stage, of those that have some; or, unless they are `all`, those of one element.
/// The same on every rank; empty for one rank.
std::map<int, SharedOutputs> shared_outputs(const graph::Graph& graph,
                                            const partitioner::Plan& plan, int ranks,
                                            int microbatches, bool all);

}  // namespace smp::pipeline
