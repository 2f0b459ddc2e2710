// SPDX-License-Identifier: Apache-2.0
#include "nn/operator_call.h"

#include "core/check.h"

namespace smp::nn {

int64_t normal_dim(const char* what, const at::Tensor& x, int64_t dim) {
  SMP_CHECK_WITH(UsageError, dim >= -x.dim() && dim < x.dim(), what, " along dimension ", dim,
                 " of a tensor of sizes ", x.sizes(), ": there is no such dimension");
  return dim < 0 ? dim + x.dim() : dim;
}

ParameterSplit split_of_whole(const at::Tensor& x, int64_t dim, int64_t blocks, int ranks) {
  const ParameterSplit split{x.sizes().vec(), dim, blocks, ranks};
  split.check();
  return split;
}

ParameterSplit split_of_part(const at::Tensor& x, int64_t dim, int64_t blocks, int ranks) {
  ParameterSplit split = split_of_whole(x, dim, blocks, 1);
  split.sizes[dim] *= ranks;
  split.ranks = ranks;
  return split;
}

}  // namespace smp::nn
