// SPDX-License-Identifier: Apache-2.0
#include "runtime/parameters/join_parts.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "dp/bucket_layout.h"

namespace smp::runtime {
namespace {

std::vector<at::Tensor> parts_of(const at::Tensor& all, const nn::ParameterSplit& split) {
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < split.ranks; ++rank) parts.push_back(all[rank]);
  return parts;
}

at::Tensor room_for_all(const nn::ParameterSplit& split, const at::Tensor& part) {
  std::vector<int64_t> sizes = part.sizes().vec();
  sizes.insert(sizes.begin(), split.ranks);
  return at::empty(sizes, part.options().requires_grad(std::nullopt));
}

}  // namespace

at::Tensor join_on_all(comm::Communicator& group, const nn::ParameterSplit& split,
                       const at::Tensor& part) {
  at::NoGradGuard no_grad;
  const at::Tensor all = room_for_all(split, part);
  group.all_gather(dp::as_real(all), dp::as_real(part.detach().contiguous()));
  return split.join(parts_of(all, split));
}

at::Tensor join_on(int root, comm::Communicator& group, const nn::ParameterSplit& split,
                   const at::Tensor& part) {
  at::NoGradGuard no_grad;
  const bool is_root = group.rank() == root;
  const at::Tensor all = is_root ? room_for_all(split, part) : at::Tensor();
  group.gather(is_root ? dp::as_real(all) : all, dp::as_real(part.detach().contiguous()), root);
  return is_root ? split.join(parts_of(all, split)) : at::Tensor();
}

}  // namespace smp::runtime
