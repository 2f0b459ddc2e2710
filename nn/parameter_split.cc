// SPDX-License-Identifier: Apache-2.0
#include "smp/nn/parameter_split.h"

#include <ATen/ops/cat.h>
#include <c10/util/StringUtil.h>

#include "core/check.h"

namespace smp::nn {
namespace {

/// A tensor with dimension `dim` seen as blocks.
at::Tensor in_blocks(const at::Tensor& tensor, int64_t dim, int64_t blocks) {
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes[dim] /= blocks;
  sizes.insert(sizes.begin() + dim, blocks);
  return tensor.reshape(sizes);
}

}  // namespace

void ParameterSplit::check() const {
  const bool exists = dim >= 0 && dim < static_cast<int64_t>(sizes.size());
  SMP_CHECK_WITH(UsageError, exists && ranks >= 1 && blocks >= 1 && sizes[dim] % (blocks * ranks) == 0,
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
  const int64_t size = sizes[dim] / blocks / ranks;
  return in_blocks(whole, dim, blocks)
      .narrow(dim + 1, rank * size, size)
      .reshape(local_sizes())
      .clone(at::MemoryFormat::Contiguous);
}

at::Tensor ParameterSplit::join(const std::vector<at::Tensor>& parts) const {
  SMP_INTERNAL_ASSERT(static_cast<int>(parts.size()) == ranks, parts.size(), " parts of ",
                      to_string());
  std::vector<at::Tensor> blocked;
  for (const at::Tensor& part : parts) blocked.push_back(in_blocks(part, dim, blocks));
  return at::cat(blocked, dim + 1).reshape(sizes);
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
