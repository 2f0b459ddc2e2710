// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <ostream>

#include "runtime/parameters/parameter_shards.h"
#include "smp/smp.h"
#include "tests/smp/models.h"
#include "tests/smp/parity.h"

/// Training with sharded data parallelism.
namespace smp::testing {

struct Sharded {
  int replicas;
  int degree;
  int microbatches = 1;
  int64_t threshold = 100;
  int64_t max_live = 1000000000;
  int64_t bucket = 1000;
  int steps = 3;
};

inline std::ostream& operator<<(std::ostream& out, const Sharded& run) {
  return out << run.replicas << " replicas, degree " << run.degree << ", " << run.microbatches
             << " microbatches, from " << run.threshold << " elements, at most " << run.max_live;
}

inline constexpr double kNoClipping = 1e9;

inline Config sharded_config(const Sharded& run, double clipping = kNoClipping) {
  Config config = Config()
                      .microbatches(run.microbatches)
                      .ddp(true)
                      .sharded_data_parallel_degree(run.degree)
                      .sdp_param_persistence_threshold(run.threshold)
                      .sdp_max_live_parameters(run.max_live)
                      .sdp_reduce_bucket_size(run.bucket)
                      .sdp_gradient_clipping(clipping)
                      .seed(kSeed)
                      .timeout_seconds(60);
  return config;
}

inline parity::Layout layout_of(const Sharded& run) {
  return {1, run.replicas, run.microbatches, "interleaved", run.steps};
}

/// Elements of the parameters that a rank holds.
inline int64_t held_elements(const torch::nn::Module& module) {
  int64_t count = 0;
  for (const auto& parameter : unique_parameters(module)) {
    count += static_cast<int64_t>(parameter.storage().nbytes() / parameter.element_size());
  }
  if (!runtime::Runtime::get().parameter_shards()) return count;
  const auto& divided = *runtime::Runtime::get().parameter_shards()->parameters();
  for (size_t i = 0; i < divided.size(); ++i) count += divided.shard(i).numel();
  return count;
}

inline const auto kAdamW = torch::optim::AdamWOptions(0.01).weight_decay(0.1);
inline const auto kSgd = torch::optim::SGDOptions(0.1).momentum(0.9);

inline TinyGpt tied_gpt() { return TinyGpt(true); }
inline TinyGpt gpt() { return TinyGpt(false); }

}  // namespace smp::testing
