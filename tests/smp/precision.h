// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "smp/smp.h"
#include "tests/smp/oracle.h"

/// Training in half precision, on ranks and in one plain libtorch process, which the two are
/// compared in bit for bit.
namespace smp::testing::precision {

/// In which layout ranks train. All train on the same four microbatches a step.
struct Layout {
  int stages = 1;
  int replicas = 1;
  std::string pipeline = "interleaved";
  bool shard_optimizer_state = false;
  int sharded_data_parallel_degree = 1;
  std::string guard = "every_step";

  int microbatches() const { return kMicrobatches / replicas; }
  int ranks() const { return stages * replicas; }

  static constexpr int kMicrobatches = 4;
  /// Sums go over two shards of two microbatches in every layout, so that all have the same bits.
  static constexpr int kShards = 2;
};

inline std::ostream& operator<<(std::ostream& out, const Layout& layout) {
  return out << layout.stages << " stages x " << layout.replicas << " replicas, " << layout.pipeline
             << (layout.shard_optimizer_state ? ", shard_optimizer_state" : "")
             << (layout.sharded_data_parallel_degree > 1 ? ", sharded parameters" : "")
             << ", guard " << layout.guard;
}

inline Config config_of(const Layout& layout) {
  return stages(layout.stages)
      .microbatches(layout.microbatches())
      .pipeline(layout.pipeline)
      .ddp(layout.replicas > 1)
      .gradient_shards(Layout::kShards)
      .bucket_cap_mb(0.002)
      .shard_optimizer_state(layout.shard_optimizer_state)
      .sharded_data_parallel_degree(layout.sharded_data_parallel_degree)
      .sdp_param_persistence_threshold(64)
      .sdp_gradient_clipping(1e30)
      .guard(layout.guard);
}

/// The layouts that every kind of training is tried in.
inline std::vector<Layout> layouts() {
  return {{1, 1},
          {1, 1, "simple", false, 1, "first_step"},
          {2, 1, "simple"},
          {2, 1, "interleaved"},
          {2, 1, "1f1b"},
          {4, 1, "1f1b"},
          {1, 2},
          {2, 2, "interleaved"},
          {2, 2, "1f1b", true},
          {1, 2, "interleaved", true},
          {1, 2, "simple", false, 2},
          {2, 2, "1f1b", false, 2}};
}

/// Embeds its inputs, normalises, and has dropout and a parameter that nothing uses.
struct NetImpl : torch::nn::Module {
  NetImpl()
      : in(register_module("in", torch::nn::Linear(kInputs, kWidth))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        drop(register_module("drop", torch::nn::Dropout(0.1))),
        middle(register_module("middle", torch::nn::Linear(kWidth, kWidth))),
        head(register_module("head", torch::nn::Linear(kWidth, 3))) {
    unused = register_parameter("unused", torch::ones({70}));
    shift = register_buffer("shift", torch::full({kWidth}, 0.1));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = torch::gelu(in(x)) + shift;
    x = x + drop(torch::tanh(middle(norm(x))));
    return head(x);
  }

  static constexpr int64_t kInputs = 5, kWidth = 24;
  torch::nn::Linear in{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Dropout drop{nullptr};
  torch::nn::Linear middle{nullptr}, head{nullptr};
  torch::Tensor unused, shift;
};
TORCH_MODULE(Net);

inline Net make_net() {
  torch::manual_seed(5);
  return Net();
}

inline torch::Tensor loss_of(const torch::Tensor& output, const torch::Tensor& target) {
  return torch::mse_loss(output, target);
}

constexpr int kSteps = 8;
/// In which step a microbatch, the last one, has an input that no half-precision number holds.
constexpr int kOverflows[] = {1, 4, 5};

/// The batch of a step. In steps that overflow one element is `spike`.
inline std::pair<torch::Tensor, torch::Tensor> batch_of(int step, double spike = 1) {
  const auto generator = at::detail::createCPUGenerator(100 + step);
  const int64_t size = 2 * Layout::kMicrobatches;
  auto x = torch::randn({size, NetImpl::kInputs}, generator);
  auto y = torch::randn({size, 3}, generator);
  for (int overflow : kOverflows) {
    if (step == overflow && spike != 1) x[size - 1][0] = spike;
  }
  return {x, y};
}

/// The results of a run.
struct Trace {
  Tensors losses;              // losses by step and microbatch
  Named weights;               // the model's
  Named masters;               // masters by parameter, if any
  std::vector<double> scales;  // after each step
  std::vector<bool> skipped;   // whether each step was skipped
  std::vector<double> norms;   // norms by step, if gradients are clipped
};

inline void expect_same(const Trace& got, const Trace& expected) {
  expect_equal(got.losses, expected.losses, "loss");
  expect_equal(got.weights, expected.weights, "weight");
  expect_equal(got.masters, expected.masters, "master");
  EXPECT_EQ(got.scales, expected.scales);
  EXPECT_EQ(got.skipped, expected.skipped);
  EXPECT_EQ(got.norms, expected.norms);
}

/// How often steps were skipped.
inline int count_skipped(const Trace& trace) {
  int count = 0;
  for (const bool skipped : trace.skipped) count += skipped;
  return count;
}

/// The gradients of one plain step: of the scaled losses of all microbatches, which `loss(m)`
/// computes.
inline Tensors plain_gradients(const Tensors& parameters,
                               const std::function<torch::Tensor(int)>& loss) {
  return mean_gradients(parameters, Layout::kShards, Layout::kMicrobatches / Layout::kShards,
                        [&](int m) { loss(m).backward(); });
}

inline bool all_finite(const Tensors& gradients) {
  for (const auto& gradient : gradients) {
    if (gradient.defined() && !torch::isfinite(gradient).all().item<bool>()) return false;
  }
  return true;
}

inline void scale_all(const Tensors& gradients, float factor) {
  for (const auto& gradient : gradients) {
    if (gradient.defined()) gradient.mul_(factor);
  }
}

/// A loss without NaN, which equals nothing.
inline torch::Tensor noted(const torch::Tensor& loss) {
  return torch::nan_to_num(loss.detach(), -7.0);
}

/// Collects losses by step and global microbatch from ranks, which must agree.
class Losses {
 public:
  explicit Losses(Trace& trace) : trace_(trace) {
    trace_.losses.resize(kSteps * Layout::kMicrobatches);
  }

  void note(int step, const StepOutput& output) {
    const std::lock_guard lock(mutex_);
    const auto of_replica = static_cast<int>(output.outputs().size());
    for (int m = 0; m < of_replica; ++m) {
      auto& place = trace_.losses[step * Layout::kMicrobatches + dp_rank() * of_replica + m];
      const auto loss = noted(output.outputs()[m]);
      if (place.defined()) expect_equal(loss, place, "loss on another rank");
      place = loss;
    }
  }

 private:
  Trace& trace_;
  std::mutex mutex_;
};

/// This replica's part of a batch.
inline torch::Tensor own(const torch::Tensor& tensor) { return part(tensor, dp_size(), dp_rank()); }

}  // namespace smp::testing::precision
