// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "smp/smp.h"
#include "tests/smp/models.h"
#include "tests/smp/oracle.h"

/// Training with `shard_optimizer_state`, without it, and in one plain libtorch process.
namespace smp::testing {

/// How the ranks are laid out, and their training.
struct Training {
  int stages = 1;
  int replicas = 2;
  bool sharded = true;
  int microbatches = 2;  ///< microbatches of a replica
  int gradient_shards = 0;
  int first_step = 0, last_step = 4;
  std::string load = {}, save = {};  ///< checkpoints, if any

  Training with_shards(int count) const {
    Training result = *this;
    result.gradient_shards = count;
    return result;
  }
};

inline std::ostream& operator<<(std::ostream& out, const Training& run) {
  return out << run.stages << " stages x " << run.replicas << " replicas"
             << (run.sharded ? ", sharded" : "");
}

/// An optimizer of one or two param groups, and whether a scheduler follows.
template <class OptimizerType, class OptionsType>
struct Recipe {
  using Optimizer = OptimizerType;
  using Options = OptionsType;

  Options options;
  bool groups = false;

  /// Matrices in the first group, other options for the rest.
  template <class Made>
  std::unique_ptr<Made> make(const Tensors& parameters) const {
    if (!groups) return std::make_unique<Made>(parameters, options);
    Tensors matrices, others;
    for (const auto& parameter : parameters) {
      (parameter.dim() > 1 ? matrices : others).push_back(parameter);
    }
    auto made = std::make_unique<Made>(matrices, options);
    auto other_options = std::make_unique<Options>(options);
    other_options->set_lr(options.get_lr() / 3);
    made->add_param_group(torch::optim::OptimizerParamGroup(others, std::move(other_options)));
    return made;
  }
};

template <class OptimizerType, class Options>
Recipe<OptimizerType, Options> recipe(Options options, bool groups = false) {
  return {std::move(options), groups};
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

/// Plain libtorch; gradients are summed over `shards` shards of microbatches.
template <class Recipe>
Named train_plain(const Recipe& recipe, int shards, int microbatches_of_shard, int steps) {
  torch::manual_seed(5);
  ShardedNet net;
  const auto parameters = unique_parameters(*net);
  auto optimizer = recipe.template make<typename Recipe::Optimizer>(parameters);
  torch::optim::StepLR scheduler(*optimizer, 2, 0.5);
  for (int step = 0; step < steps; ++step) {
    optimizer->zero_grad();
    const auto batch = batch_of(step, shards * microbatches_of_shard);
    plain_backward(parameters, shards, microbatches_of_shard, [&](int m) {
      const KeyedRandom random(kSeed, "step 0", step, m);
      const int count = shards * microbatches_of_shard;
      return net->loss(part(batch[0], count, m), part(batch[1], count, m));
    });
    optimizer->step();
    scheduler.step();
  }
  return state_of(*net);
}

inline Config config_of(const Training& run) {
  return stages(run.stages)
      .microbatches(run.microbatches)
      .ddp(true)
      .gradient_shards(run.gradient_shards)
      .bucket_cap_mb(0.004)  // several buckets, of about a thousand elements
      .shard_optimizer_state(run.sharded);
}

/// On ranks as threads. Calls `inspect(model, optimizer, step)` after each step, one rank at a
/// time.
template <class Recipe, class Inspect>
Named train_ranks(const Training& run, const Recipe& recipe, const Inspect& inspect,
                  const ModelOptions& options = {}) {
  Named result;
  std::mutex mutex;
  torch::set_num_threads(1);
  std::vector<ShardedNet> nets;
  for (int i = 0; i < run.stages * run.replicas; ++i) {
    torch::manual_seed(5);
    nets.emplace_back();
  }
  run_as_threads(run.stages * run.replicas, config_of(run), [&] {
    DistributedModel<ShardedNet> model(nets[rank()], options);
    auto optimizer =
        recipe.template make<DistributedOptimizer<typename Recipe::Optimizer>>(model->parameters());
    torch::optim::StepLR scheduler(*optimizer, 2, 0.5);
    if (!run.load.empty()) {
      EXPECT_EQ(smp::load(run.load, model, *optimizer).step, run.first_step);
    }
    auto net = model.get_module();
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = net->loss(x, y);
      model->backward(loss);
      return loss;
    });
    for (int i = run.first_step; i < run.last_step; ++i) {
      optimizer->zero_grad();
      const auto batch = batch_of(i, run.replicas * run.microbatches);
      train(part(batch[0], run.replicas, dp_rank()), part(batch[1], run.replicas, dp_rank()));
      optimizer->step();
      // Loading restores the rate, not the scheduler's count.
      if (run.load.empty() && run.save.empty()) scheduler.step();
      const std::lock_guard lock(mutex);
      inspect(model, *optimizer, i);
    }
    if (!run.save.empty()) smp::save(run.save, model, *optimizer);
    const auto state = to_map(model->state_dict());
    const std::lock_guard lock(mutex);
    if (result.empty()) result = state;
    expect_equal(state, result, "replicas");
  });
  return result;
}

template <class Recipe>
Named train_ranks(const Training& run, const Recipe& recipe, const ModelOptions& options = {}) {
  return train_ranks(
      run, recipe, [](auto&, auto&, int) {}, options);
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
