// SPDX-License-Identifier: Apache-2.0
#include "dp/replica_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/check.h"

namespace smp::dp {
namespace {

using Lines = std::vector<std::pair<std::string, std::string>>;

/// "conv.weight = Float [3, 3]", or that there is none.
std::string say(const Lines& lines, size_t index) {
  if (index >= lines.size()) return "no more of them";
  return lines[index].first + " = " + lines[index].second;
}

}  // namespace

void check_same_on_all_ranks(comm::Communicator& group, const Lines& lines) {
  std::string bytes;
  nlohmann::json::to_msgpack(lines, bytes);
  const auto all = comm::all_gather_bytes(group, bytes);
  std::vector<int> differ;
  for (int rank = 1; rank < group.size(); ++rank) {
    if (all[rank] != all[0]) differ.push_back(rank);
  }
  if (differ.empty()) return;
  const auto first = nlohmann::json::from_msgpack(all[0]).get<Lines>();
  const auto other = nlohmann::json::from_msgpack(all[differ.front()]).get<Lines>();
  const auto difference = std::mismatch(first.begin(), first.end(), other.begin(), other.end());
  const size_t at = difference.first - first.begin();
  SMP_CHECK_WITH(UsageError, false,
                 "DistributedDataParallel: ", differ.size() == 1 ? "rank " : "ranks ",
                 c10::Join(", ", differ),
                 " wrapped another model or gave other options than rank 0. First difference: ",
                 say(first, at), " on rank 0, ", say(other, at), " on rank ", differ.front(),
                 ". Build the same model with the same options on all ranks");
}

std::string describe_tensor(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), " ", tensor.sizes(), " with strides ", tensor.strides(),
                  tensor.requires_grad() ? "" : ", without gradient");
}

TensorBroadcast::TensorBroadcast(std::vector<at::Tensor> tensors, comm::CommunicatorPtr group)
    : tensors_(std::move(tensors)), group_(std::move(group)) {
  if (tensors_.empty()) return;
  constexpr int64_t kAlignment = 64;
  std::vector<int64_t> offsets;
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors_) {
    offsets.push_back(bytes);
    bytes += (static_cast<int64_t>(tensor.nbytes()) + kAlignment - 1) / kAlignment * kAlignment;
  }
  message_ = at::zeros({bytes}, at::TensorOptions(at::kByte).device(tensors_.front().device()));
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const at::Tensor& tensor = tensors_[i];
    places_.push_back(message_.narrow(0, offsets[i], static_cast<int64_t>(tensor.nbytes()))
                          .view(tensor.scalar_type())
                          .view(tensor.sizes()));
  }
}

void TensorBroadcast::run(int root) {
  if (tensors_.empty() || group_->size() == 1) return;
  const at::NoGradGuard no_grad;
  const bool is_root = group_->rank() == root;
  for (size_t i = 0; is_root && i < tensors_.size(); ++i) places_[i].copy_(tensors_[i]);
  group_->broadcast(message_, root);
  for (size_t i = 0; !is_root && i < tensors_.size(); ++i) tensors_[i].copy_(places_[i]);
}

void broadcast_in_chunks(std::vector<at::Tensor> tensors, const comm::CommunicatorPtr& group,
                         int root) {
  constexpr size_t kChunkBytes = 64 << 20;
  std::vector<at::Tensor> chunk;
  size_t bytes = 0;
  const auto send = [&] {
    TensorBroadcast(std::exchange(chunk, {}), group).run(root);
    bytes = 0;
  };
  for (at::Tensor& tensor : tensors) {
    bytes += tensor.nbytes();
    chunk.push_back(std::move(tensor));
    if (bytes >= kChunkBytes) send();
  }
  send();
}

}  // namespace smp::dp
