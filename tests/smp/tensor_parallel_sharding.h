// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "smp/smp.h"

/// Replicas that divide tensors that a tensor-parallel group has divided already.
namespace smp::testing {

/// So that pieces of several parameters share a bucket, and some parameters lie in two pieces.
inline Config with_divided_states(Config config) {
  return config.shard_optimizer_state(true).bucket_cap_mb(0.002);
}

/// All but the smallest parameters, over two replicas. Without an effect of the clipping.
inline Config with_divided_parameters(Config config) {
  return config.sharded_data_parallel_degree(2)
      .sdp_param_persistence_threshold(16)
      .sdp_max_live_parameters(200)
      .sdp_reduce_bucket_size(300)
      .sdp_gradient_clipping(1e9);
}

}  // namespace smp::testing
