// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <functional>
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

/// Training on pipelines whose ranks hold shards of the parameters of their stages.
template <class Net, class Optimizer, class Options>
auto sharded_pipelines(const parity::Layout& layout, const Sharded& run,
                       const std::function<Net()>& make, const Options& options) {
  auto result = parity::training<Net, Optimizer>(layout, make, options);
  result.config = sharded_config(run).partitions(layout.stages).pipeline(layout.pipeline);
  return result;
}

template <class Training>
void expect_as_plain(const Training& tested) {
  auto sharded = tested.run_on_ranks();
  const auto plain = tested.run_plain();
  // Gradients of shards are compared by the optimizers' results.
  sharded.gradients = plain.gradients;
  expect_same(sharded, plain);
}

/// Weights that are read through views, several times, far apart; a frozen one; parts of one
/// weight; one that does not reach the loss.
struct ViewNetImpl : torch::nn::Module {
  ViewNetImpl() {
    square = register_parameter("square", torch::randn({8, 8}) * 0.3);
    fused = register_parameter("fused", torch::randn({24, 8}) * 0.3);
    strided = register_parameter(
        "strided", (torch::randn({8, 12}) * 0.3).t().clone(at::MemoryFormat::Preserve));
    frozen = register_parameter("frozen", torch::randn({12, 8}) * 0.3, /*requires_grad=*/false);
    aside = register_parameter("aside", torch::randn({8, 8}));
    unused = register_parameter("unused", torch::randn({8, 8}));
  }

  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    const auto transposed = square.t();
    const auto parts = fused.chunk(3);
    {
      const torch::NoGradGuard no_grad;
      y = y + 0.01 * torch::tanh(y.matmul(aside));
    }
    x = torch::tanh(x.matmul(transposed));
    for (const auto& part : parts) x = x + torch::relu(x.matmul(part));
    x = x.matmul(strided.t()).matmul(frozen);
    x = torch::tanh(x.matmul(square)) + fused.narrow(0, 3, 1);
    return torch::mse_loss(x, y) + 1e-3 * square.square().sum();
  }

  static Tensors batch(int64_t size) { return {torch::randn({size, 8}), torch::randn({size, 8})}; }

  torch::Tensor square, fused, strided, frozen, aside, unused;
};
TORCH_MODULE(ViewNet);

inline TinyGpt tied_gpt() { return TinyGpt(true); }
inline TinyGpt gpt() { return TinyGpt(false); }

}  // namespace smp::testing
