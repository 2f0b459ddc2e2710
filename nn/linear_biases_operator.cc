// SPDX-License-Identifier: Apache-2.0
// smp::tp_linear_biases.

#include <torch/library.h>

#include "core/check.h"
#include "nn/linear_biases.h"
#include "nn/tensor_group.h"

namespace smp::nn {
namespace {

using at::Tensor;

/// Biases in the type of scores [N, heads of the rank or all of them, queries, keys].
Tensor biases_of_scores(const Tensor& scores, int64_t heads, int64_t bias_max) {
  Tensor slopes = alibi_slopes(heads, bias_max, scores);
  const int64_t own = scores.size(1);
  if (own != heads) {
    const auto group = tensor_group();
    SMP_INTERNAL_ASSERT(own * group->size() == heads, "biases of ", own, " of ", heads, " heads");
    slopes = slopes.narrow(0, group->rank() * own, own);
  }
  return linear_biases(slopes, scores.size(2), scores.size(3)).to(scores.scalar_type());
}

TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def("tp_linear_biases(Tensor scores, int heads, int bias_max) -> Tensor");
}

// It has no history: scores lend their sizes and type only.
TORCH_LIBRARY_IMPL(smp, CompositeImplicitAutograd, m) {
  m.impl("tp_linear_biases", &biases_of_scores);
}

}  // namespace
}  // namespace smp::nn
