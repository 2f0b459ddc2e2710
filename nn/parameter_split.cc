// SPDX-License-Identifier: Apache-2.0
#include "smp/nn/parameter_split.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

#include "core/check.h"
#include "nn/parameter_sharding.h"

namespace smp::nn {

comm::Sharding sharding_of(const ParameterSplit& split, const core::Axis& over) {
  const std::vector<int64_t> extents(split.blocks, split.sizes[split.dim] / split.blocks);
  return {split.sizes, {}, {{over, comm::Blocks{split.dim, extents}}}};
}

ParameterSplit split_of(const comm::Sharding& sharding, const core::Axis& over) {
  const comm::Sharding lies = sharding.along(over).value();
  const auto& blocks = std::get<comm::Blocks>(lies.cuts.front().how);
  const auto& extents = blocks.extents;
  SMP_INTERNAL_ASSERT(std::equal(extents.begin() + 1, extents.end(), extents.begin()),
                      "unequal blocks as equal ones: ", sharding.to_string());
  return {lies.sizes, blocks.dim, static_cast<int64_t>(extents.size()), over.size};
}

void ParameterSplit::check() const {
  const bool exists = dim >= 0 && dim < static_cast<int64_t>(sizes.size());
  SMP_CHECK_WITH(UsageError,
                 exists && ranks >= 1 && blocks >= 1 && sizes[dim] % (blocks * ranks) == 0,
                 "a tensor cannot be divided as ", to_string(),
                 ": the size must be a multiple of blocks x ranks (", blocks * ranks,
                 "). Choose a tensor_parallel_degree that divides it");
}

std::vector<int64_t> ParameterSplit::local_sizes() const {
  check();
  std::vector<int64_t> local = sizes;
  local[dim] /= ranks;
  return local;
}

at::Tensor ParameterSplit::part(const at::Tensor& whole, int rank) const {
  check();
  SMP_INTERNAL_ASSERT(whole.sizes() == at::IntArrayRef(sizes), "a part of ", whole.sizes(),
                      " as of ", to_string());
  return sharding_of(*this, {1, ranks}).cut(whole, rank);
}

at::Tensor ParameterSplit::join(const std::vector<at::Tensor>& parts) const {
  return sharding_of(*this, {1, ranks}).join(parts);
}

std::string ParameterSplit::to_string() const {
  std::string text = c10::str(at::IntArrayRef(sizes), " along dimension ", dim);
  if (blocks > 1) text += c10::str(" in ", blocks, " blocks");
  return text + c10::str(" over ", ranks, " ranks");
}

bool ParameterSplit::operator==(const ParameterSplit& other) const {
  return sizes == other.sizes && dim == other.dim && blocks == other.blocks && ranks == other.ranks;
}

}  // namespace smp::nn
