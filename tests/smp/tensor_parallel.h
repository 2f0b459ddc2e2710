// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "nn/tensor_group.h"
#include "smp/nn/operators.h"
#include "smp/nn/parameter_split.h"
#include "smp/nn/split_module.h"
#include "tests/smp/oracle.h"

/// The common part of the tests of tensor parallelism: a language model whose blocks are divided by
/// hand, the same as plain libtorch, and runs of both.
namespace smp::testing {

/// A gated feed-forward block, as plain libtorch.
struct PlainBlock : torch::nn::Module {
  PlainBlock(int64_t width, int64_t hidden, double dropout) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_parameter("up", torch::randn({2 * hidden, width}) * 0.3);
    up_bias = register_parameter("up_bias", torch::randn({2 * hidden}) * 0.1);
    down = register_parameter("down", torch::randn({width, hidden}) * 0.3);
    down_bias = register_parameter("down_bias", torch::randn({width}) * 0.1);
    drop = register_module("drop", torch::nn::Dropout(dropout));
  }

  torch::Tensor forward(torch::Tensor x) {
    const auto gates = torch::nn::functional::linear(norm(x), up, up_bias).chunk(2, -1);
    const auto y = torch::nn::functional::linear(torch::silu(gates[0]) * gates[1], down);
    return x + drop(y + down_bias);
  }

  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Dropout drop{nullptr};
  torch::Tensor up, up_bias, down, down_bias;
};

/// The same with this rank's parts of the three large parameters.
struct DividedBlock : torch::nn::Module, nn::SplitModule {
  DividedBlock(int64_t width, int64_t hidden, double dropout) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    splits_["up"] = {{2 * hidden, width}, 0, 2, nn::tensor_group()->size()};
    splits_["up_bias"] = {{2 * hidden}, 0, 2, nn::tensor_group()->size()};
    splits_["down"] = {{width, hidden}, 1, 1, nn::tensor_group()->size()};
    up = make("up", torch::randn({2 * hidden, width}) * 0.3);
    up_bias = make("up_bias", torch::randn({2 * hidden}) * 0.1);
    down = make("down", torch::randn({width, hidden}) * 0.3);
    down_bias = register_parameter("down_bias", torch::randn({width}) * 0.1);
    drop = register_module("drop", torch::nn::Dropout(dropout));
  }

  torch::Tensor forward(torch::Tensor x) {
    const auto gates =
        torch::nn::functional::linear(nn::copy_to_group(norm(x)), up, up_bias).chunk(2, -1);
    const auto y = torch::nn::functional::linear(torch::silu(gates[0]) * gates[1], down);
    return x + drop(nn::reduce_from_group(y) + down_bias);
  }

  std::map<std::string, nn::ParameterSplit> split_parameters() const override { return splits_; }

  torch::Tensor make(const std::string& name, const torch::Tensor& whole) {
    return register_parameter(name, splits_.at(name).part(whole, nn::tensor_group()->rank()));
  }

  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Dropout drop{nullptr};
  torch::Tensor up, up_bias, down, down_bias;

 private:
  std::map<std::string, nn::ParameterSplit> splits_;
};

template <class Block>
struct LanguageModel : torch::nn::Module {
  explicit LanguageModel(int layers = 3, double dropout = 0.1) {
    tokens = register_module("tokens", torch::nn::Embedding(kVocabulary, kWidth));
    for (int i = 0; i < layers; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i),
                                       std::make_shared<Block>(kWidth, kHidden, dropout)));
    }
    head = register_module("head", torch::nn::Linear(kWidth, kVocabulary));
  }

  torch::Tensor forward(torch::Tensor ids) {
    auto x = tokens(ids);
    for (const auto& block : blocks) x = block->forward(x);
    return head(x);
  }

  torch::Tensor loss(torch::Tensor ids, torch::Tensor targets) {
    return torch::nn::functional::cross_entropy(forward(ids).flatten(0, 1), targets.flatten());
  }

  static constexpr int64_t kVocabulary = 11, kWidth = 8, kHidden = 16, kLength = 5;
  torch::nn::Embedding tokens{nullptr};
  std::vector<std::shared_ptr<Block>> blocks;
  torch::nn::Linear head{nullptr};
};

using PlainModel = LanguageModel<PlainBlock>;
using DividedModel = LanguageModel<DividedBlock>;

template <class Net>
using ModelOf = DistributedModel<std::shared_ptr<Net>>;

/// Constructs a model in float64, the same on every thread.
template <class Net, class... Arguments>
std::shared_ptr<Net> make_model(uint64_t seed, Arguments&&... arguments) {
  static std::mutex mutex;  // ranks that are threads share the generator
  const std::lock_guard lock(mutex);
  torch::manual_seed(seed);
  auto net = std::make_shared<Net>(std::forward<Arguments>(arguments)...);
  net->to(torch::kDouble);
  return net;
}

/// A way to lay a run out. All ranks together run `kMicrobatches` microbatches.
struct TensorLayout {
  int degree;
  int stages = 1;
  int replicas = 1;
  bool prescaled = false;
  std::string placement = "cluster";

  int ranks() const { return degree * stages * replicas; }
  /// How many batches the ranks of a stage are given.
  int batches() const { return replicas * (prescaled ? 1 : degree); }
};

inline std::ostream& operator<<(std::ostream& out, const TensorLayout& layout) {
  return out << "tensor " << layout.degree << " x pipeline " << layout.stages << " x data "
             << layout.replicas << (layout.prescaled ? ", prescaled" : "") << ", "
             << layout.placement;
}

constexpr int kMicrobatches = 8;
constexpr int64_t kSamples = 2;  // samples of a microbatch

inline Config config_of(const TensorLayout& layout) {
  return Config()
      .partitions(layout.stages)
      .tensor_parallel_degree(layout.degree)
      .prescaled_batch(layout.prescaled)
      .microbatches(kMicrobatches / layout.batches())
      .ddp(layout.ranks() > layout.stages)
      .placement_strategy(layout.placement)
      .seed(kSeed)
      .timeout_seconds(60);
}

/// The batch of all ranks together in a step.
inline Tensors token_batch(int number) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + number);
  const auto draw = [&] {
    return torch::randint(DividedModel::kVocabulary,
                          {kMicrobatches * kSamples, DividedModel::kLength}, generator,
                          torch::kLong);
  };
  const auto ids = draw();
  return {ids, draw()};
}

/// This rank's part of a batch.
inline torch::Tensor own_batch(const TensorLayout& layout, const torch::Tensor& batch) {
  return part(batch, layout.batches(), layout.prescaled ? rdp_rank() : dp_rank());
}

}  // namespace smp::testing
