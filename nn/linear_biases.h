// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace smp::nn {

/// The slopes of attention with linear biases (arXiv 2108.12409) [heads], which end at
/// 2 ^ -bias_max: as the paper defines them for a power of two; between them, every other one of
/// the next power. In the type of `like`, but float32 for half precision, which does not hold all
/// positions (bfloat16 none between 256 and 258).
at::Tensor alibi_slopes(int64_t heads, int64_t bias_max, const at::Tensor& like);

/// The term added to scores [N, heads, queries, keys]: for each head its slope times the distance
/// of query and key, negated [1, heads, queries, keys].
at::Tensor linear_biases(const at::Tensor& slopes, int64_t queries, int64_t keys);

}  // namespace smp::nn
