// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "tests/smp/tensor_parallel_run.h"

// The configurations that SageMaker's documentation gives for large models, with the features that
// each puts together, on a small one: against one plain process. In half precision:
// tensor_parallel_half_test.cc.
namespace smp {
namespace {

using namespace testing;

/// A GPT that eight ranks can divide by heads.
struct EightHeadGpt : torch::nn::Module {
  struct Block : torch::nn::Module {
    Block() {
      norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
      qkv = register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth));
      out = register_module("out", torch::nn::Linear(kWidth, kWidth));
      up = register_module("up", torch::nn::Linear(kWidth, 4 * kWidth));
      down = register_module("down", torch::nn::Linear(4 * kWidth, kWidth));
      drop = register_module("drop", torch::nn::Dropout(0.1));
    }
    torch::Tensor forward(torch::Tensor x) {
      const auto parts = qkv(norm(x))
                             .view({x.size(0), x.size(1), 3, kHeads, kWidth / kHeads})
                             .permute({2, 0, 3, 1, 4});
      const auto mixed =
          torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
      x = x + drop(out(mixed.transpose(1, 2).reshape(x.sizes())));
      return x + drop(down(torch::gelu(up(x))));
    }
    torch::nn::LayerNorm norm{nullptr};
    torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
    torch::nn::Dropout drop{nullptr};
  };

  EightHeadGpt() {
    tokens = register_module("tokens", torch::nn::Embedding(PlainModel::kVocabulary, kWidth));
    for (int i = 0; i < 2; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), std::make_shared<Block>()));
    }
    head = register_module("head", torch::nn::Linear(kWidth, PlainModel::kVocabulary));
  }
  torch::Tensor loss(torch::Tensor ids, torch::Tensor targets) {
    auto x = tokens(ids);
    for (const auto& block : blocks) x = block->forward(x);
    return torch::nn::functional::cross_entropy(head(x).flatten(0, 1), targets.flatten());
  }

  static constexpr int64_t kHeads = 8, kWidth = 16;
  torch::nn::Embedding tokens{nullptr};
  std::vector<std::shared_ptr<Block>> blocks;
  torch::nn::Linear head{nullptr};
};

struct Documented {
  std::string model;
  TensorLayout layout;
  bool checkpoints;  ///< each layer's activations
  std::function<Config(Config)> change;
  bool keeps_gradients = true;  ///< whole, where the test sees them
};

std::ostream& operator<<(std::ostream& out, const Documented& one) { return out << one.model; }

class DocumentedConfigurations : public ::testing::TestWithParam<Documented> {};

TEST_P(DocumentedConfigurations, TrainAsOneProcess) {
  const Documented& tested = GetParam();
  const auto prepare = [&](EightHeadGpt& net) {
    if (tested.layout.degree > 1) set_tensor_parallelism(net);
    if (!tested.checkpoints) return;
    for (const auto& block : net.blocks) set_activation_checkpointing(*block);
  };
  const auto plain = run_plain<EightHeadGpt>();
  auto got = run_on_ranks<EightHeadGpt>(tested.layout, prepare, tested.change);
  if (!tested.keeps_gradients) got.gradients = plain.gradients;
  expect_close(got, plain);
  if (tested.layout.degree > 1) {
    EXPECT_EQ(got.divided.count("block1.qkv.weight"), 1u) << got.report;
    EXPECT_EQ(got.divided.count("block1.up.weight"), 1u) << got.report;
  }
}

Config sharded_over(Config config, int64_t degree) {
  return config.sharded_data_parallel_degree(degree)
      .sdp_param_persistence_threshold(16)
      .sdp_max_live_parameters(3000)
      .sdp_reduce_bucket_size(1000)
      .sdp_gradient_clipping(1e9);
}

INSTANTIATE_TEST_SUITE_P(
    All, DocumentedConfigurations,
    ::testing::Values(
        Documented{"Gpt10B",
                   {4, 1, 2, true},
                   true,
                   [](Config config) {
                     return config.shard_optimizer_state(true).optimize("speed").skip_tracing(true);
                   },
                   false},
        Documented{"Gpt30B",
                   {8, 1, 1, true},
                   true,
                   [](Config config) { return config.optimize("speed").skip_tracing(true); }},
        Documented{"Gpt60B",
                   {8, 2, 1, true},
                   true,
                   [](Config config) {
                     return config.optimize("speed").skip_tracing(true).active_microbatches(2);
                   }},
        Documented{"NeoX20B",
                   {1, 1, 8},
                   true,
                   [](Config config) { return sharded_over(config, 8).skip_tracing(true); },
                   false},
        Documented{"NeoX65B",
                   {2, 1, 4, true},
                   true,
                   [](Config config) {
                     return sharded_over(config, 4).skip_tracing(true).offload_activations(true);
                   },
                   false}),
    [](const auto& info) { return info.param.model; });

}  // namespace
}  // namespace smp
