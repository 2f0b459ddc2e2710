#include "runtime/parameters/divided_parameters.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "core/check.h"
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

void DividedParameters::add(const std::string& name, const at::Tensor& tensor,
                            const nn::ParameterSplit& split, bool captured_whole) {
  SMP_INTERNAL_ASSERT(tensor.sizes() == at::IntArrayRef(split.local_sizes()), name, " has sizes ",
                      tensor.sizes(), " and is no part of ", split.to_string());
  by_impl_.emplace(tensor.unsafeGetTensorImpl(), entries_.size());
  entries_.push_back({name, tensor, split, captured_whole});
}

const nn::ParameterSplit* DividedParameters::find(const at::Tensor& tensor) const {
  const auto found = by_impl_.find(tensor.unsafeGetTensorImpl());
  return found == by_impl_.end() ? nullptr : &entries_[found->second].split;
}

std::vector<int64_t> DividedParameters::whole_sizes(const at::Tensor& tensor) const {
  const nn::ParameterSplit* split = find(tensor);
  return split == nullptr ? tensor.sizes().vec() : split->sizes;
}

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
