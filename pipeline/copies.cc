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
                             std::shared_ptr<dp::ShardedParameters> parameters,
                             const std::vector<std::optional<size_t>>& shard_of_value)
    : parameters_(std::move(parameters)) {
  for (const graph::ValueId id : copy.values) {
    const std::optional<size_t> shard = parameters_ ? shard_of_value[id] : std::nullopt;
    copied_.push_back({id, table.at(graph.values[id].name).tensor, shard});
  }
}

std::vector<CopiedTensors::Copied> CopiedTensors::written(const Unwritten& unwritten) const {
  std::vector<Copied> result;
  for (const Copied& copied : copied_) {
    if (unwritten.count(copied.value) == 0) result.push_back(copied);
  }
  return result;
}

void CopiedTensors::send(comm::Communicator& pipeline, int to, const Unwritten& unwritten) const {
  std::vector<std::pair<at::Tensor, WorkPtr>> sends;
  const auto wait = [&] {
    for (const auto& [message, sending] : sends) sending->wait();
    sends.clear();
  };
  for (const auto& [value, tensor, shard] : written(unwritten)) {
    if (shard) {
      parameters_->gather(*shard);
      parameters_->wait(*shard);
    }
    const at::Tensor message = tensor.detach().contiguous();
    sends.emplace_back(message, pipeline.isend(message, to, kCopyTag));
    if (!shard) continue;
    wait();
    parameters_->release(*shard);
  }
  wait();
}

void CopiedTensors::receive(comm::Communicator& pipeline, int from,
                            const Unwritten& unwritten) const {
  const at::NoGradGuard no_grad;
  for (const auto& [value, tensor, shard] : written(unwritten)) {
    const at::Tensor message = at::empty(tensor.sizes(), tensor.options());
    pipeline.recv(message, from, kCopyTag);
    tensor.detach().copy_(message);
  }
}

int64_t CopiedTensors::nbytes(const Unwritten& unwritten) const {
  int64_t bytes = 0;
  for (const auto& [value, tensor, shard] : written(unwritten)) {
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

}  // namespace smp::pipeline
