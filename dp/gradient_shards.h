#pragma once

namespace smp::dp {

/// How many shards of gradients (`gradient_shards`: in all) a replica sums whose step has so many
/// microbatches. Throws `ConfigError` unless all replicas have the same whole number of them, and
/// they the same number of microbatches.
int local_gradient_shards(int gradient_shards, int microbatches, int replicas);

}  // namespace smp::dp
