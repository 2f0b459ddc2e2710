// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/batch_exchange.h"

#include <ATen/ops/empty.h>

#include "core/check.h"
#include "pipeline/message.h"
#include "runtime/first_difference.h"
#include "runtime/step/microbatches.h"

namespace smp::runtime {
namespace {

std::string describe(const std::vector<at::Tensor>& tensors) {
  std::string text;
  for (const at::Tensor& tensor : tensors) {
    text += c10::str(text.empty() ? "" : ", ", tensor.scalar_type(), tensor.sizes());
    // Kernels may round by them, so they are kept.
    if (!tensor.is_contiguous()) text += c10::str(" with strides ", tensor.strides());
  }
  return text.empty() ? "nothing" : text;
}

void check_alike(comm::Communicator& group, const std::vector<at::Tensor>& mine,
                 const std::string& step_name) {
  const auto all = comm::all_gather_bytes(group, describe(mine));
  const size_t other = first_other(all);
  SMP_CHECK_WITH(UsageError, other == 0, "step function \"", step_name,
                 "\" was given inputs of other shapes on the ranks of a tensor-parallel group, "
                 "which run the batches of all together: tp rank 0 has ",
                 all[0], ", tp rank ", other, " has ", all[other],
                 ". Give them batches of one size and order in memory (contiguous()), or one batch "
                 "and \"prescaled_batch\": true");
}

/// The tensors of a message, in the place of `mine`. Every rank takes its own from there, too: a
/// message may change strides, and graphs are to be alike.
std::vector<at::Tensor> unpack_like(const std::vector<at::Tensor>& mine,
                                    const pipeline::MessageLayout& layout,
                                    const at::Tensor& message) {
  std::vector<at::Tensor> tensors = layout.unpack(message);
  for (size_t i = 0; i < mine.size(); ++i) tensors[i].requires_grad_(mine[i].requires_grad());
  return tensors;
}

}  // namespace

std::vector<std::vector<at::Tensor>> exchange_batches(comm::Communicator& group,
                                                      const std::vector<at::Tensor>& mine,
                                                      const std::string& step_name) {
  check_alike(group, mine, step_name);
  std::vector<std::vector<at::Tensor>> batches(group.size());
  if (mine.empty()) return batches;
  const pipeline::MessageLayout layout(metas_of(mine));
  const at::Tensor all = at::empty({group.size(), layout.nbytes()}, at::kByte);
  group.all_gather(all, layout.pack(mine));
  for (int rank = 0; rank < group.size(); ++rank) {
    batches[rank] = unpack_like(mine, layout, all[rank]);
  }
  return batches;
}

std::vector<at::Tensor> take_first_batch(comm::Communicator& group,
                                         const std::vector<at::Tensor>& mine,
                                         const std::string& step_name) {
  const auto all = comm::all_gather_bytes(group, describe(mine));
  const size_t other = first_other(all);
  SMP_CHECK_WITH(UsageError, other == 0, "step function \"", step_name,
                 "\": with \"input_source\": \"first\", pp rank ", other, " passes ", all[other],
                 ", and pp rank 0, whose inputs count, ", all[0],
                 ". Pass dummies of the same shapes, types and order in memory there");
  if (mine.empty() || group.size() == 1) return mine;
  const pipeline::MessageLayout layout(metas_of(mine));
  const at::Tensor message = group.rank() == 0 ? layout.pack(mine) : layout.make_buffer();
  group.broadcast(message, /*root=*/0);
  return unpack_like(mine, layout, message);
}

}  // namespace smp::runtime
