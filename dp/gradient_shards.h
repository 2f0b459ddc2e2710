#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

// What sums of a step's gradients have in common, whoever keeps which part of them.
namespace smp::dp {

/// How many shards of gradients (`gradient_shards`: in all) a replica sums whose step has so many
/// microbatches. Throws `ConfigError` unless all replicas have the same whole number of them, and
/// they the same number of microbatches.
int local_gradient_shards(int gradient_shards, int microbatches, int replicas);

/// Throws `UsageError` for a sparse gradient; `name` is its parameter's.
void check_dense(const at::Tensor& gradient, const std::string& name);

/// Bytes, one for each parameter: 1 where a shard has a gradient of it. `used`: by shard, then
/// parameter; at least one shard.
at::Tensor used_by_any(const std::vector<std::vector<bool>>& used);

}  // namespace smp::dp
