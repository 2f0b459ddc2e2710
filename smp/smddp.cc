// SPDX-License-Identifier: Apache-2.0
#include "smp/smddp.h"

#include <ATen/ops/empty.h>

#include <numeric>
#include <optional>

#include "comm/group_core.h"
#include "comm/world.h"
#include "core/check.h"

namespace smp::smddp {
namespace {

std::optional<Group>& the_group() {
  static std::optional<Group> instance;
  return instance;
}

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
  const comm::CommunicatorPtr world = comm::make_world();
  std::vector<int> all(world->size());
  std::iota(all.begin(), all.end(), 0);
  const comm::CommunicatorPtr own = world->split(all, "smddp");
  own->set_timeout(timeout);
  the_group() = comm::make_public_group(own, all);
}

bool is_initialized() { return the_group().has_value(); }

Group group() {
  SMP_CHECK_WITH(
      UsageError, is_initialized(),
      "smddp was used before it was initialised. Call smp::smddp::init_process_group() at "
      "the start of main()");
  return *the_group();
}

int get_rank() { return group().rank(); }
int get_world_size() { return group().size(); }
int get_local_rank() { return group(), comm::world_hosts().local_rank; }
int get_local_size() { return group(), comm::world_hosts().local_size; }

WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op, bool async_op) {
  return finish(group().async().all_reduce(tensor, op), async_op);
}

WorkPtr reduce(const at::Tensor& tensor, int dst, ReduceOp op, bool async_op) {
  return finish(group().async().reduce(tensor, dst, op), async_op);
}

WorkPtr broadcast(const at::Tensor& tensor, int src, bool async_op) {
  return finish(group().async().broadcast(tensor, src), async_op);
}

WorkPtr all_gather(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor,
                   bool async_op) {
  const int size = group().size();
  SMP_CHECK_WITH(UsageError, static_cast<int>(tensors.size()) == size,
                 "smddp::all_gather: expected one tensor for each of the ", size, " ranks, got ",
                 tensors.size(), ".");
  const at::Tensor flat = at::empty({size, tensor.numel()}, tensor.options());
  const auto copy_out = [flat, tensors] {
    for (size_t i = 0; i < tensors.size(); ++i) {
      tensors[i].copy_(flat[static_cast<int64_t>(i)].view(tensors[i].sizes()));
    }
  };
  return finish(then(group().async().all_gather(flat, tensor), copy_out), async_op);
}

WorkPtr all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                          const std::vector<int64_t>& output_split_sizes,
                          const std::vector<int64_t>& input_split_sizes, bool async_op) {
  return finish(group().async().all_to_all(output, elements(output_split_sizes, output), input,
                                           elements(input_split_sizes, input)),
                async_op);
}

void barrier() { group().barrier(); }

}  // namespace smp::smddp
