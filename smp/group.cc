#include "smp/group.h"

#include <ATen/ops/empty.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "core/check.h"
#include "runtime/runtime.h"

namespace smp {
namespace {

using runtime::Runtime;

comm::Communicator& communicator(CommGroup kind, const char* call) {
  const Runtime& runtime = Runtime::get();
  SMP_CHECK_WITH(UsageError, !runtime.current_step.is_running, call,
                 " was called inside a step function; communicate between steps");
  return *runtime.group(kind);
}

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

int Group::rank() const { return Runtime::get().rank_in(kind_); }

int Group::size() const { return Runtime::get().topology().size(kind_); }

std::vector<int> Group::ranks() const {
  const Runtime& runtime = Runtime::get();
  return runtime.topology().members(kind_, runtime.rank());
}

void Group::barrier() const { communicator(kind_, "smp::barrier").barrier(); }

at::Tensor Group::all_reduce(const at::Tensor& tensor) const {
  at::Tensor sum = tensor.detach().clone(at::MemoryFormat::Contiguous);
  communicator(kind_, "smp::all_reduce").all_reduce(sum);
  return sum;
}

at::Tensor Group::all_gather(const at::Tensor& tensor) const {
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes.insert(sizes.begin(), size());
  at::Tensor all = at::empty(sizes, tensor.options());
  communicator(kind_, "smp::Group::all_gather").all_gather(all, tensor.detach().contiguous());
  return all;
}

c10::intrusive_ptr<c10d::ProcessGroup> Group::process_group() const {
  return Runtime::get().process_group(kind_);
}

Group group(CommGroup kind) {
  Runtime::get();  // throws before `init`
  return Group(kind);
}

void barrier(CommGroup kind) { group(kind).barrier(); }

at::Tensor all_reduce(const at::Tensor& tensor, CommGroup kind) {
  return group(kind).all_reduce(tensor);
}

at::Tensor shard(const at::Tensor& batch, int64_t axis) {
  const bool prescaled = Runtime::get().config().prescaled_batch();
  const Group replicas = group(prescaled ? CommGroup::kRdp : CommGroup::kDp);
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
