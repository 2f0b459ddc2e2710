// SPDX-License-Identifier: Apache-2.0
#include "smp/group.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/group_core.h"
#include "core/check.h"
#include "runtime/runtime.h"

namespace smp {
namespace {

using runtime::Runtime;

/// A group of the program that `init` made, by its kind: models may give it another communicator,
/// for their device, and each rank that is a thread has its own.
class ProgramCore final : public comm::GroupCore {
 public:
  explicit ProgramCore(CommGroup kind) : kind_(kind) {}

  comm::CommunicatorPtr communicator() const override { return Runtime::get().group(kind_); }

  std::vector<int> ranks() const override {
    const Runtime& runtime = Runtime::get();
    return runtime.topology().members(kind_, runtime.rank());
  }

  c10::intrusive_ptr<c10d::ProcessGroup> process_group() const override {
    return Runtime::get().process_group(kind_);
  }

  void check_may_communicate(const char* call) const override {
    SMP_CHECK_WITH(UsageError, !Runtime::get().current_step.is_running, call,
                   " was called inside a step function; communicate between steps");
  }

 private:
  const CommGroup kind_;
};

}  // namespace

int rank() { return Runtime::get().rank(); }
int size() { return group(CommGroup::kWorld).size(); }
int local_rank() { return Runtime::get().topology().local_rank(rank()); }
int local_size() { return Runtime::get().topology().local_size(rank()); }
int pp_rank() { return group(CommGroup::kPp).rank(); }
int pp_size() { return group(CommGroup::kPp).size(); }
int tp_rank() { return group(CommGroup::kTp).rank(); }
int tp_size() { return group(CommGroup::kTp).size(); }
int rdp_rank() { return group(CommGroup::kRdp).rank(); }
int rdp_size() { return group(CommGroup::kRdp).size(); }
int mp_rank() { return group(CommGroup::kMp).rank(); }
int mp_size() { return group(CommGroup::kMp).size(); }
int dp_rank() { return group(CommGroup::kDp).rank(); }
int dp_size() { return group(CommGroup::kDp).size(); }

Group::Group(CommGroup kind) : core_(std::make_shared<ProgramCore>(kind)) {}

Group group(CommGroup kind) {
  Runtime::get();  // throws before `init`
  return Group(kind);
}

void barrier(const Group& group) { group.barrier(); }

at::Tensor all_reduce(const at::Tensor& tensor, const Group& group) {
  return group.all_reduce(tensor);
}

at::Tensor shard(const at::Tensor& batch, int64_t axis) {
  SMP_CHECK_WITH(UsageError, batch.defined(), "smp::shard: the batch is undefined");
  const bool prescaled = Runtime::get().config().prescaled_batch();
  const Group replicas(prescaled ? CommGroup::kRdp : CommGroup::kDp);
  const int64_t parts = replicas.size();
  SMP_CHECK_WITH(UsageError, -batch.dim() <= axis && axis < batch.dim(),
                 "smp::shard: a tensor of shape ", batch.sizes(), " has no axis ", axis);
  SMP_CHECK_WITH(UsageError, batch.size(axis) % parts == 0, "smp::shard: a tensor of shape ",
                 batch.sizes(), " has no ", parts, " equal parts along axis ", axis,
                 ", one for each replica. Choose a batch size that is a multiple of ", parts,
                 ", or drop the last incomplete batch (drop_last)");
  const int64_t length = batch.size(axis) / parts;
  return batch.narrow(axis, replicas.rank() * length, length);
}

}  // namespace smp
