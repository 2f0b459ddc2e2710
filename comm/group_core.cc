// SPDX-License-Identifier: Apache-2.0
#include "comm/group_core.h"

#include <ATen/ops/empty.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/c10d/process_group.h"
#include "core/status.h"

namespace smp {
namespace comm {
namespace {

/// Ranks that have a communicator of their own.
class OwnCore final : public GroupCore {
 public:
  OwnCore(CommunicatorPtr communicator, std::vector<int> ranks)
      : communicator_(std::move(communicator)), ranks_(std::move(ranks)) {}

  CommunicatorPtr communicator() const override { return communicator_; }
  std::vector<int> ranks() const override { return ranks_; }
  void check_may_communicate(const char*) const override {}

  c10::intrusive_ptr<c10d::ProcessGroup> process_group() const override {
    if (!process_group_) process_group_ = make_process_group(communicator_);
    return process_group_;
  }

 private:
  const CommunicatorPtr communicator_;
  const std::vector<int> ranks_;
  mutable c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
};

}  // namespace

smp::Group make_public_group(CommunicatorPtr communicator, std::vector<int> ranks) {
  return smp::Group(std::make_shared<OwnCore>(std::move(communicator), std::move(ranks)));
}

}  // namespace comm

AsyncCollectives::AsyncCollectives(comm::CommunicatorPtr communicator)
    : communicator_(std::move(communicator)) {}

WorkPtr AsyncCollectives::all_reduce(const at::Tensor& tensor, ReduceOp op) const {
  return communicator_->async().all_reduce(tensor, op);
}

WorkPtr AsyncCollectives::reduce(const at::Tensor& tensor, int root, ReduceOp op) const {
  return communicator_->async().reduce(tensor, root, op);
}

WorkPtr AsyncCollectives::broadcast(const at::Tensor& tensor, int root) const {
  return communicator_->async().broadcast(tensor, root);
}

WorkPtr AsyncCollectives::all_gather(const at::Tensor& output, const at::Tensor& input) const {
  return communicator_->async().all_gather(output, input);
}

WorkPtr AsyncCollectives::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                         ReduceOp op) const {
  return communicator_->async().reduce_scatter(output, input, op);
}

WorkPtr AsyncCollectives::all_to_all(const at::Tensor& output,
                                     const std::vector<int64_t>& output_splits,
                                     const at::Tensor& input,
                                     const std::vector<int64_t>& input_splits) const {
  return communicator_->async().all_to_all(output, output_splits, input, input_splits);
}

WorkPtr AsyncCollectives::gather(const at::Tensor& output, const at::Tensor& input,
                                 int root) const {
  return communicator_->async().gather(output, input, root);
}

WorkPtr AsyncCollectives::scatter(const at::Tensor& output, const at::Tensor& input,
                                  int root) const {
  return communicator_->async().scatter(output, input, root);
}

WorkPtr AsyncCollectives::barrier() const { return communicator_->async().barrier(); }

int Group::rank() const { return core_->communicator()->rank(); }

int Group::size() const { return core_->communicator()->size(); }

std::vector<int> Group::ranks() const { return core_->ranks(); }

void Group::barrier() const {
  core_->check_may_communicate("smp::barrier");
  const core::CallScope here("smp::barrier");
  core_->communicator()->barrier();
}

at::Tensor Group::all_reduce(const at::Tensor& tensor, ReduceOp op) const {
  core_->check_may_communicate("smp::all_reduce");
  const core::CallScope here("smp::all_reduce");
  at::Tensor result = tensor.detach().clone(at::MemoryFormat::Contiguous);
  core_->communicator()->all_reduce(result, op);
  return result;
}

at::Tensor Group::all_gather(const at::Tensor& tensor) const {
  core_->check_may_communicate("smp::Group::all_gather");
  const core::CallScope here("smp::Group::all_gather");
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes.insert(sizes.begin(), size());
  at::Tensor all = at::empty(sizes, tensor.options());
  core_->communicator()->all_gather(all, tensor.detach().contiguous());
  return all;
}

AsyncCollectives Group::async() const {
  core_->check_may_communicate("smp::Group::async");
  return AsyncCollectives(core_->communicator());
}

c10::intrusive_ptr<c10d::ProcessGroup> Group::process_group() const {
  return core_->process_group();
}

}  // namespace smp
