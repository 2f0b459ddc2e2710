// SPDX-License-Identifier: Apache-2.0
#include "comm/group_core.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/c10d/process_group.h"
#include "comm/differentiable.h"
#include "core/check.h"
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

/// The collectives that a public group starts: autograd does not see them.
class StartedCollectives final : public CollectiveOperations<StartedCollectives, WorkPtr> {
 public:
  explicit StartedCollectives(Communicator& group) : group_(group) {}

  WorkPtr issue(const Collective& call) {
    for (const at::Tensor& tensor : {call.output, call.input}) {
      check_needs_no_gradient(
          c10::str("smp::Group::async().", call.name()),
          "collectives that are started are not differentiated (those of smp::Group that return "
          "their result are)",
          tensor);
    }
    return group_.start(call);
  }

 private:
  Communicator& group_;
};

void check_is_defined(const char* call, const at::Tensor& tensor) {
  SMP_CHECK_WITH(UsageError, tensor.defined(), call, ": the tensor is undefined");
}

/// The reductions that return their result.
void check_reduction(const char* call, const at::Tensor& tensor, ReduceOp op) {
  check_is_defined(call, tensor);
  if (op == ReduceOp::kSum || op == ReduceOp::kAverage) return;
  check_needs_no_gradient(c10::str(call, " (", to_string(op), ")"),
                          "only sums and averages over ranks have one", tensor);
}

void check_rows(const char* call, const at::Tensor& tensor, int size) {
  check_is_defined(call, tensor);
  SMP_CHECK_WITH(UsageError, tensor.dim() > 0 && tensor.size(0) == size, call,
                 ": expected a tensor with ", size,
                 " rows, one for each rank of the group, got shape ", tensor.sizes(),
                 ". Give it the shape [", size, ", ...], by unflatten for example");
}

}  // namespace

smp::Group make_public_group(CommunicatorPtr communicator, std::vector<int> ranks) {
  return smp::Group(std::make_shared<OwnCore>(std::move(communicator), std::move(ranks)));
}

}  // namespace comm

AsyncCollectives::AsyncCollectives(comm::CommunicatorPtr communicator)
    : communicator_(std::move(communicator)) {}

WorkPtr AsyncCollectives::all_reduce(const at::Tensor& tensor, ReduceOp op) const {
  return comm::StartedCollectives(*communicator_).all_reduce(tensor, op);
}

WorkPtr AsyncCollectives::reduce(const at::Tensor& tensor, int root, ReduceOp op) const {
  return comm::StartedCollectives(*communicator_).reduce(tensor, root, op);
}

WorkPtr AsyncCollectives::broadcast(const at::Tensor& tensor, int root) const {
  return comm::StartedCollectives(*communicator_).broadcast(tensor, root);
}

WorkPtr AsyncCollectives::all_gather(const at::Tensor& output, const at::Tensor& input) const {
  return comm::StartedCollectives(*communicator_).all_gather(output, input);
}

WorkPtr AsyncCollectives::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                         ReduceOp op) const {
  return comm::StartedCollectives(*communicator_).reduce_scatter(output, input, op);
}

WorkPtr AsyncCollectives::all_to_all(const at::Tensor& output,
                                     const std::vector<int64_t>& output_splits,
                                     const at::Tensor& input,
                                     const std::vector<int64_t>& input_splits) const {
  return comm::StartedCollectives(*communicator_)
      .all_to_all(output, output_splits, input, input_splits);
}

WorkPtr AsyncCollectives::gather(const at::Tensor& output, const at::Tensor& input,
                                 int root) const {
  return comm::StartedCollectives(*communicator_).gather(output, input, root);
}

WorkPtr AsyncCollectives::scatter(const at::Tensor& output, const at::Tensor& input,
                                  int root) const {
  return comm::StartedCollectives(*communicator_).scatter(output, input, root);
}

WorkPtr AsyncCollectives::barrier() const {
  return comm::StartedCollectives(*communicator_).barrier();
}

int Group::rank() const { return core_->communicator()->rank(); }

int Group::size() const { return core_->communicator()->size(); }

std::vector<int> Group::ranks() const { return core_->ranks(); }

void Group::barrier() const {
  core_->check_may_communicate("smp::barrier");
  const core::CallScope here("smp::barrier", "", core::kOwnCollective);
  core_->communicator()->barrier();
}

at::Tensor Group::all_reduce(const at::Tensor& tensor, ReduceOp op) const {
  core_->check_may_communicate("smp::all_reduce");
  comm::check_reduction("smp::all_reduce", tensor, op);
  const core::CallScope here("smp::all_reduce", "", core::kOwnCollective);
  return comm::all_reduce(core_->communicator(), tensor, op);
}

at::Tensor Group::all_gather(const at::Tensor& tensor) const {
  core_->check_may_communicate("smp::Group::all_gather");
  comm::check_is_defined("smp::Group::all_gather", tensor);
  const core::CallScope here("smp::Group::all_gather", "", core::kOwnCollective);
  return comm::all_gather(core_->communicator(), tensor);
}

at::Tensor Group::reduce_scatter(const at::Tensor& tensor, ReduceOp op) const {
  core_->check_may_communicate("smp::Group::reduce_scatter");
  comm::check_rows("smp::Group::reduce_scatter", tensor, size());
  comm::check_reduction("smp::Group::reduce_scatter", tensor, op);
  const core::CallScope here("smp::Group::reduce_scatter", "", core::kOwnCollective);
  return comm::reduce_scatter(core_->communicator(), tensor, op);
}

at::Tensor Group::all_to_all(const at::Tensor& tensor) const {
  core_->check_may_communicate("smp::Group::all_to_all");
  comm::check_rows("smp::Group::all_to_all", tensor, size());
  const core::CallScope here("smp::Group::all_to_all", "", core::kOwnCollective);
  return comm::all_to_all(core_->communicator(), tensor);
}

at::Tensor Group::broadcast(const at::Tensor& tensor, int root) const {
  core_->check_may_communicate("smp::Group::broadcast");
  comm::check_is_defined("smp::Group::broadcast", tensor);
  const core::CallScope here("smp::Group::broadcast", "", core::kOwnCollective);
  return comm::broadcast(core_->communicator(), tensor, root);
}

AsyncCollectives Group::async() const {
  core_->check_may_communicate("smp::Group::async");
  return AsyncCollectives(core_->communicator());
}

c10::intrusive_ptr<c10d::ProcessGroup> Group::process_group() const {
  return core_->process_group();
}

}  // namespace smp
