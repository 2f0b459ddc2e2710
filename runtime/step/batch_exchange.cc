// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/batch_exchange.h"

#include <ATen/ops/empty.h>

#include "core/check.h"
#include "graph/graph.h"
#include "pipeline/message.h"
#include "runtime/first_difference.h"

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
                 "which run the batches of all together: tp rank 0 has ", all[0], ", tp rank ",
                 other, " has ", all[other],
                 ". Give them batches of one size and order in memory (contiguous()), or one batch "
                 "and \"prescaled_batch\": true");
}

}  // namespace

std::vector<std::vector<at::Tensor>> exchange_batches(comm::Communicator& group,
                                                      const std::vector<at::Tensor>& mine,
                                                      const std::string& step_name) {
  check_alike(group, mine, step_name);
  std::vector<std::vector<at::Tensor>> batches(group.size());
  if (mine.empty()) return batches;
  std::vector<graph::TensorMeta> metas;
  for (const at::Tensor& tensor : mine) metas.push_back(graph::TensorMeta::of(tensor));
  const pipeline::MessageLayout layout(metas);
  const at::Tensor all = at::empty({group.size(), layout.nbytes()}, at::kByte);
  group.all_gather(all, layout.pack(mine));
  for (int rank = 0; rank < group.size(); ++rank) {
    batches[rank] = layout.unpack(all[rank]);  // the own, too: alike on all ranks
    for (size_t i = 0; i < mine.size(); ++i) {
      batches[rank][i].requires_grad_(mine[i].requires_grad());
    }
  }
  return batches;
}

}  // namespace smp::runtime
