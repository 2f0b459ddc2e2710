// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <mutex>
#include <ostream>
#include <vector>

#include "smp/smp.h"
#include "tests/smp/models.h"
#include "tests/smp/training_case.h"

/// Training with `shard_optimizer_state`, without it, and in one plain libtorch process.
namespace smp::testing {

/// How the ranks are laid out, and their training.
struct Training {
  int stages = 1;
  int replicas = 2;
  bool sharded = true;
  int microbatches = 2;  ///< microbatches of a replica
  int gradient_shards = 0;
  int steps = 4;
};

inline std::ostream& operator<<(std::ostream& out, const Training& run) {
  return out << run.stages << " stages x " << run.replicas << " replicas"
             << (run.sharded ? ", sharded" : "");
}

/// A GPT of odd sizes whose head is tied, and a parameter that nothing uses.
struct ShardedNetImpl : TinyGptImpl {
  ShardedNetImpl() : TinyGptImpl(/*tied=*/true, /*layers=*/2) {
    unused = register_parameter("unused", torch::ones({90}));
    // Dense, in another order.
    turned = register_parameter("turned", torch::randn({kWidth, 24}).t());
  }
  torch::Tensor loss(torch::Tensor ids, torch::Tensor targets) {
    return TinyGptImpl::loss(ids, targets) + 1e-3 * (turned * turned).sum();
  }
  torch::Tensor unused, turned;
};
TORCH_MODULE(ShardedNet);

constexpr int kBatchOfMicrobatch = 2;

/// The whole batch of a step, for all replicas.
inline Tensors batch_of(int step, int global_microbatches) {
  const auto generator = at::detail::createCPUGenerator(100 + step);
  const auto draw = [&] {
    return torch::randint(TinyGptImpl::kVocabulary,
                          {kBatchOfMicrobatch * global_microbatches, TinyGptImpl::kLength},
                          generator);
  };
  auto ids = draw();
  return {ids, draw()};
}

inline Config config_of(const Training& run) {
  return stages(run.stages)
      .microbatches(run.microbatches)
      .ddp(true)
      .gradient_shards(run.gradient_shards)
      .bucket_cap_mb(0.004)  // several buckets, of about a thousand elements
      .shard_optimizer_state(run.sharded);
}

/// Plain libtorch, if it is run so, sums gradients over the replicas or the shards.
template <class Recipe>
TrainingCase<ShardedNet, Recipe> sharded_case(const Training& run, const Recipe& recipe) {
  TrainingCase<ShardedNet, Recipe> result([] { return ShardedNet(); }, recipe);
  result.config = config_of(run);
  result.ranks = run.stages * run.replicas;
  result.microbatches = run.replicas * run.microbatches;
  result.shards = run.gradient_shards > 0 ? run.gradient_shards : run.replicas;
  result.batch = [count = result.microbatches](int step) { return batch_of(step, count); };
  result.steps = run.steps;
  result.loss = [](auto& model, auto x, auto y) { return model.get_module()->loss(x, y); };
  result.decays = true;
  result.evaluates = false;
  return result;
}

/// The weights of both are the same.
template <class Recipe>
void expect_as_plain(const Recipe& recipe, const std::vector<Training>& runs) {
  for (const Training& run : runs) {
    SCOPED_TRACE(c10::str(run));
    const auto tested = sharded_case(run, recipe);
    expect_equal(tested.run_on_ranks().weights, tested.run_plain().weights, "value");
  }
}

/// Whatever `loop(model, train)` does with a small model on two replicas, each of which trains on
/// the same batch in every step; its weights.
inline Named train_mlp(
    bool sharded,
    const std::function<void(DistributedModel<Mlp>&, const std::function<torch::Tensor()>&)>& loop,
    torch::Dtype dtype = torch::kFloat) {
  Named result;
  std::mutex mutex;
  torch::set_num_threads(1);
  std::vector<Mlp> nets;
  for (int i = 0; i < 2; ++i) {
    torch::manual_seed(3);
    nets.emplace_back();
    nets.back()->to(dtype);
  }
  torch::manual_seed(4);
  const auto x = torch::randn({2, 8, MlpImpl::kWidth}).to(dtype);
  run_as_threads(2, stages(1).ddp(true).shard_optimizer_state(sharded), [&] {
    DistributedModel<Mlp> model(nets[rank()]);
    auto train = step([&](torch::Tensor input) {
      auto loss = model(input).square().mean();
      model->backward(loss);
      return loss;
    });
    loop(model, [&] { return train(x[rank()].clone()).reduce_mean(); });
    const std::lock_guard lock(mutex);
    result = state_of(*model.get_module());
  });
  return result;
}

template <class Loop>
void expect_same_with_and_without(const Loop& loop, torch::Dtype dtype = torch::kFloat) {
  expect_equal(train_mlp(true, loop, dtype), train_mlp(false, loop, dtype), "value");
}

}  // namespace smp::testing
