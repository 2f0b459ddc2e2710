// SPDX-License-Identifier: Apache-2.0
#include "pipeline/copies.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <map>
#include <utility>

namespace smp::pipeline {
namespace {

/// Above those of any number of edges.
constexpr comm::Tag kCopyTag = 1 << 19;

}  // namespace

std::vector<Frame::Copy> copies_of(const partitioner::Plan& plan) {
  std::map<std::pair<int, int>, std::vector<graph::ValueId>> values;  // values by stages
  std::set<std::pair<graph::ValueId, int>> known;                     // values on ranks
  for (const auto& replica : plan.replicas) {
    const int rank = plan.rank_of_stage[replica.stage];
    if (plan.rank_of_stage[replica.owner] == rank) continue;
    if (!known.emplace(replica.value, rank).second) continue;
    values[{replica.owner, replica.stage}].push_back(replica.value);
  }
  std::vector<Frame::Copy> copies;
  for (auto& [stages, of_stages] : values) {
    copies.push_back({stages.first, stages.second, std::move(of_stages)});
  }
  return copies;
}

CopiedTensors::CopiedTensors(const Frame::Copy& copy, const graph::Graph& graph,
                             const graph::TensorTable& table,
                             const std::vector<std::optional<size_t>>& shard_of_value) {
  for (const graph::ValueId id : copy.values) {
    copied_.emplace_back(id, table.at(graph.values[id].name).tensor);
    if (!shard_of_value.empty() && shard_of_value[id]) shards_.push_back(*shard_of_value[id]);
  }
}

void CopiedTensors::send(comm::Communicator& pipeline, int to,
                         const std::set<graph::ValueId>& unwritten) const {
  std::vector<at::Tensor> sent;
  std::vector<WorkPtr> sends;
  for (const auto& [value, tensor] : copied_) {
    if (unwritten.count(value) > 0) continue;
    sent.push_back(tensor.detach().contiguous());
    sends.push_back(pipeline.isend(sent.back(), to, kCopyTag));
  }
  for (const WorkPtr& sending : sends) sending->wait();
}

void CopiedTensors::receive(comm::Communicator& pipeline, int from,
                            const std::set<graph::ValueId>& unwritten) const {
  const at::NoGradGuard no_grad;
  for (const auto& [value, tensor] : copied_) {
    if (unwritten.count(value) > 0) continue;
    const at::Tensor message = at::empty(tensor.sizes(), tensor.options());
    pipeline.recv(message, from, kCopyTag);
    tensor.detach().copy_(message);
  }
}

int64_t CopiedTensors::nbytes() const {
  int64_t bytes = 0;
  for (const auto& [value, tensor] : copied_) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

}  // namespace smp::pipeline
