#include "smp/smddp.h"

#include <ATen/ops/empty.h>

#include "comm/communicator.h"
#include "comm/world.h"
#include "core/check.h"

namespace smp::smddp {
namespace {

using comm::Communicator;
using comm::CommunicatorPtr;

CommunicatorPtr& group() {
  static CommunicatorPtr instance;
  return instance;
}

Communicator& initialized() {
  SMP_CHECK_WITH(UsageError, group() != nullptr,
                 "smddp was used before it was initialised. Call smp::smddp::init_process_group() at "
                 "the start of main()");
  return *group();
}

// Copies the parts of a gathered tensor to where the user wants them, when all have come.
class GatherWork final : public comm::Work {
 public:
  GatherWork(WorkPtr work, at::Tensor flat, std::vector<at::Tensor> parts)
      : work_(std::move(work)), flat_(std::move(flat)), parts_(std::move(parts)) {}

  bool test() override { return work_->test(); }

  void wait() override {
    work_->wait();
    for (size_t i = 0; i < parts_.size(); ++i) {
      parts_[i].copy_(flat_[static_cast<int64_t>(i)].view(parts_[i].sizes()));
    }
    parts_.clear();
  }

 private:
  const WorkPtr work_;
  const at::Tensor flat_;
  std::vector<at::Tensor> parts_;
};

WorkPtr finish(WorkPtr work, bool async_op) {
  if (!async_op) work->wait();
  return work;
}

/// Rows as elements, which communicators count in.
std::vector<int64_t> elements(std::vector<int64_t> rows, const at::Tensor& tensor) {
  const int64_t all = tensor.dim() == 0 ? 1 : tensor.size(0);
  for (int64_t& number : rows) number *= all == 0 ? 0 : tensor.numel() / all;
  return rows;
}

}  // namespace

bool is_available() { return comm::launcher() != comm::Launcher::kNone; }

void init_process_group(std::chrono::milliseconds timeout) {
  SMP_CHECK_WITH(UsageError, !is_initialized(),
                 "smp::smddp::init_process_group was called twice; call it once");
  const CommunicatorPtr world = comm::make_world();
  std::vector<int> all(world->size());
  for (int rank = 0; rank < world->size(); ++rank) all[rank] = rank;
  group() = world->split(all, "smddp");
  group()->set_timeout(timeout);
}

bool is_initialized() { return group() != nullptr; }

int get_rank() { return initialized().rank(); }
int get_world_size() { return initialized().size(); }
int get_local_rank() { return initialized(), comm::world_hosts().local_rank; }
int get_local_size() { return initialized(), comm::world_hosts().local_size; }

WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op, bool async_op) {
  return finish(initialized().async().all_reduce(tensor, op), async_op);
}

WorkPtr reduce(const at::Tensor& tensor, int dst, ReduceOp op, bool async_op) {
  return finish(initialized().async().reduce(tensor, dst, op), async_op);
}

WorkPtr broadcast(const at::Tensor& tensor, int src, bool async_op) {
  return finish(initialized().async().broadcast(tensor, src), async_op);
}

WorkPtr all_gather(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor,
                   bool async_op) {
  Communicator& world = initialized();
  SMP_CHECK_WITH(UsageError, static_cast<int>(tensors.size()) == world.size(),
                 "smddp::all_gather: expected one tensor for each of the ", world.size(),
                 " ranks, got ", tensors.size(), ".");
  const at::Tensor flat = at::empty({world.size(), tensor.numel()}, tensor.options());
  WorkPtr work = world.async().all_gather(flat, tensor);
  return finish(std::make_shared<GatherWork>(std::move(work), flat, tensors), async_op);
}

WorkPtr all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                          const std::vector<int64_t>& output_split_sizes,
                          const std::vector<int64_t>& input_split_sizes, bool async_op) {
  return finish(initialized().async().all_to_all(output, elements(output_split_sizes, output),
                                                 input, elements(input_split_sizes, input)),
                async_op);
}

void barrier() { initialized().barrier(); }

}  // namespace smp::smddp
