// SPDX-License-Identifier: Apache-2.0
#include "pipeline/outputs.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace smp::pipeline {
namespace {

std::vector<graph::TensorMeta> output_metas(const graph::Graph& graph,
                                            const std::vector<int>& positions, int microbatches) {
  std::vector<graph::TensorMeta> result;
  for (const int position : positions) {
    const graph::TensorMeta& meta = graph.values[graph.outputs[position]].meta;
    result.insert(result.end(), microbatches, meta);
  }
  return result;
}

}  // namespace

SharedOutputs::SharedOutputs(const graph::Graph& graph, std::vector<int> positions,
                             int microbatches)
    : positions_(std::move(positions)),
      microbatches_(microbatches),
      layout_(output_metas(graph, positions_, microbatches)) {}

std::vector<at::Tensor> SharedOutputs::in_order(const StepResults& results) const {
  std::vector<at::Tensor> tensors(positions_.size() * microbatches_);
  for (const StepResults::Output& output : results.outputs) {
    const auto found = std::find(positions_.begin(), positions_.end(), output.position);
    if (found == positions_.end()) continue;
    tensors[(found - positions_.begin()) * microbatches_ + output.microbatch] = output.value;
  }
  return tensors;
}

void SharedOutputs::share(comm::Communicator& pipeline, int rank, StepResults& results) const {
  at::Tensor message, part;
  if (layout_.device().is_cpu()) {
    message = layout_.make_buffer();
  } else {
    message = at::empty({layout_.header_bytes()}, at::kByte);
    part = at::empty({layout_.nbytes() - layout_.header_bytes()},
                     at::device(layout_.device()).dtype(at::kByte));
  }
  const bool is_mine = rank == pipeline.rank();
  if (is_mine) {
    const auto copied = layout_.begin_pack(in_order(results), message, part);
    SMP_INTERNAL_ASSERT(!copied, "outputs are packed where they lie");
  }
  pipeline.broadcast(message, rank);
  if (part.defined()) pipeline.broadcast(part, rank);
  if (is_mine) return;
  std::vector<at::Tensor> tensors = layout_.unpack(message, part);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int index = static_cast<int>(i);
    results.outputs.push_back(
        {positions_[index / microbatches_], index % microbatches_, std::move(tensors[i])});
  }
}

std::map<int, SharedOutputs> shared_outputs(const graph::Graph& graph,
                                            const partitioner::Plan& plan, int ranks,
                                            int microbatches, bool all) {
  if (ranks == 1) return {};
  std::map<int, std::vector<int>> positions;  // positions by stage
  for (size_t i = 0; i < graph.outputs.size(); ++i) {
    const graph::ValueId id = graph.outputs[i];
    if (id == graph::kUndefined || (!all && graph.values[id].meta.numel() > 1)) continue;
    positions[plan.stage_of_output[i]].push_back(static_cast<int>(i));
  }
  std::map<int, SharedOutputs> result;
  for (auto& [stage, of_stage] : positions) {
    result.try_emplace(stage, graph, std::move(of_stage), microbatches);
  }
  return result;
}

}  // namespace smp::pipeline
