// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <string>
#include <vector>

// Parameters, gradients of 8 microbatches, and their sums as documented.

namespace smp::dp {

inline std::vector<at::Tensor> make_parameters() {
  std::vector<at::Tensor> parameters{at::zeros({5, 3}), at::zeros({7}), at::zeros({4, 6}).t(),
                                     at::zeros({2, 2}, at::kDouble), at::zeros({3})};
  for (auto& parameter : parameters) parameter.requires_grad_();
  return parameters;
}

inline const std::vector<std::string> kNames{"a", "b", "c", "d", "unused"};

inline at::Tensor gradient(size_t parameter, int global_microbatch) {
  at::manual_seed(100 * parameter + global_microbatch);
  const auto like = make_parameters()[parameter];
  return at::randn(like.sizes(), like.options().requires_grad(false));
}

/// Gradients of 8 microbatches in `shards` shards, summed as documented.
inline at::Tensor expected(size_t parameter, int shards, double divisor) {
  at::Tensor total;
  for (int shard = 0; shard < shards; ++shard) {
    at::Tensor sum;
    for (int m = shard * 8 / shards; m < (shard + 1) * 8 / shards; ++m) {
      const auto g = gradient(parameter, m);
      sum = sum.defined() ? sum + g : g;
    }
    total = total.defined() ? total + sum : sum;
  }
  return total / divisor;
}

}  // namespace smp::dp
