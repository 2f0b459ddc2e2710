// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "smp/nn.h"
#include "tests/nn/harness.h"
#include "tests/smp/tensor_parallel_run.h"

// A language model made of the modules of smp::nn, on ranks that divide it, against one rank, where
// they are plain layers, and against one process of plain libtorch.
namespace smp {
namespace {

using namespace testing;

constexpr int64_t kLayers = 2, kHeads = 4, kChannels = 4, kHidden = kHeads * kChannels, kInner = 32,
                  kWords = 12, kLength = 8;
constexpr double kDropout = 0.1;

Tensors tokens(int number) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + number);
  const auto draw = [&] {
    return torch::randint(kWords, {kMicrobatches * kSamples, kLength}, generator, torch::kLong);
  };
  const auto ids = draw();
  return {ids, draw()};
}

struct GptOfModules : torch::nn::Module {
  GptOfModules() {
    gpt = register_module("gpt",
                          nn::DistributedTransformerLMHead(nn::DistributedTransformerLMHeadOptions()
                                                               .num_layers(kLayers)
                                                               .num_attention_heads(kHeads)
                                                               .attention_head_size(kChannels)
                                                               .hidden_size(kHidden)
                                                               .intermediate_size(kInner)
                                                               .vocab_size(kWords)
                                                               .num_positions(kLength)
                                                               .causal_mask_size(kLength)
                                                               .attention_dropout_prob(kDropout)
                                                               .hidden_dropout_prob(kDropout)
                                                               .initializer_range(0.3)
                                                               .use_normal_initialization(true)
                                                               .pre_layernorm(true)
                                                               .post_layernorm(false)));
  }

  torch::Tensor loss(torch::Tensor ids, torch::Tensor targets) {
    return gpt->forward(nn::DistributedTransformerLMHeadImpl::Five{ids, {}, {}, {}, targets});
  }

  static Tensors step_batch(int number) { return tokens(number); }

  nn::DistributedTransformerLMHead gpt{nullptr};
};

void recompute_layers(GptOfModules& net) {
  for (const auto& layer : *net.gpt->transformer->seq_layers) set_activation_checkpointing(*layer);
}

// ---------------------------------------------------------------------------------------------
// The same of torch::nn, with parameters of the same names

torch::nn::LayerNorm make_norm() {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({kHidden}));
}

struct PlainAttention : torch::nn::Module {
  PlainAttention() {
    pre_layernorm = register_module("pre_layernorm", make_norm());
    query_key_value = register_module("query_key_value", torch::nn::Linear(kHidden, 3 * kHidden));
    dense = register_module("dense", torch::nn::Linear(kHidden, kHidden));
    drop = register_module("drop", torch::nn::Dropout(kDropout));
  }

  torch::Tensor forward(torch::Tensor x) {
    Tensors parts;
    for (const auto& part : query_key_value(pre_layernorm(x)).chunk(3, -1)) {
      parts.push_back(part.view({x.size(0), x.size(1), kHeads, kChannels}).transpose(1, 2));
    }
    const auto later = torch::ones({x.size(1), x.size(1)}, torch::kBool).triu(1);
    const auto scores = (torch::matmul(parts[0], parts[1].transpose(2, 3)) / std::sqrt(kChannels))
                            .masked_fill(later, -INFINITY);
    const auto context = torch::matmul(drop(scores.softmax(-1)), parts[2]);
    return x + drop(dense(context.transpose(1, 2).flatten(2)));
  }

  torch::nn::LayerNorm pre_layernorm{nullptr};
  torch::nn::Linear query_key_value{nullptr}, dense{nullptr};
  torch::nn::Dropout drop{nullptr};
};

struct PlainOutput : torch::nn::Module {
  PlainOutput() {
    pre_layernorm = register_module("pre_layernorm", make_norm());
    dense1 = register_module("dense1", torch::nn::Linear(kHidden, kInner));
    dense2 = register_module("dense2", torch::nn::Linear(kInner, kHidden));
    drop = register_module("drop", torch::nn::Dropout(kDropout));
  }

  torch::Tensor forward(torch::Tensor x) {
    return x + drop(dense2(torch::gelu(dense1(pre_layernorm(x)))));
  }

  torch::nn::LayerNorm pre_layernorm{nullptr};
  torch::nn::Linear dense1{nullptr}, dense2{nullptr};
  torch::nn::Dropout drop{nullptr};
};

struct PlainLayer : torch::nn::Module {
  PlainLayer() {
    attention = register_module("attention", std::make_shared<PlainAttention>());
    output = register_module("output", std::make_shared<PlainOutput>());
  }

  torch::Tensor forward(torch::Tensor x) { return output->forward(attention->forward(x)); }

  std::shared_ptr<PlainAttention> attention;
  std::shared_ptr<PlainOutput> output;
};

struct PlainGpt : torch::nn::Module {
  PlainGpt() {
    word_embedding = torch::nn::Embedding(kWords, kHidden);
    position_embedding = torch::nn::Embedding(kLength, kHidden);
    layernorm = make_norm();
    const auto gpt = register_module("gpt", std::make_shared<torch::nn::Module>("gpt"));
    gpt->register_module("word_embedding", word_embedding);
    gpt->register_module("position_embedding", position_embedding);
    const auto transformer =
        gpt->register_module("transformer", std::make_shared<torch::nn::Module>("transformer"));
    const auto list = transformer->register_module("seq_layers", torch::nn::ModuleList());
    for (int64_t i = 0; i < kLayers; ++i) {
      layers.push_back(std::make_shared<PlainLayer>());
      list->push_back(layers.back());
    }
    gpt->register_module("layernorm", layernorm);
  }

  torch::Tensor loss(torch::Tensor ids, torch::Tensor targets) {
    auto x = word_embedding(ids) + position_embedding(torch::arange(ids.size(1)));
    for (const auto& layer : layers) x = layer->forward(x);
    const auto logits = torch::matmul(layernorm(x), word_embedding->weight.t());
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
  }

  static Tensors step_batch(int number) { return tokens(number); }

  torch::nn::Embedding word_embedding{nullptr}, position_embedding{nullptr};
  std::vector<std::shared_ptr<PlainLayer>> layers;
  torch::nn::LayerNorm layernorm{nullptr};
};

/// The first values of the modules, whole, as `run_on_ranks` has them.
Named first_values() {
  Named values;
  nn::testing::on_ranks(1, [&](int) { values = state_of(*make_model<GptOfModules>(5)); });
  return values;
}

/// One process of plain libtorch that begins with these values.
Outcome run_plain_gpt() {
  const Named values = first_values();
  return run_plain<PlainGpt>([&](PlainGpt& net) {
    const torch::NoGradGuard no_grad;
    auto parameters = net.named_parameters();
    ASSERT_EQ(parameters.size(), values.size());
    for (auto& item : parameters) item.value().copy_(values.at(item.key()));
  });
}

// ---------------------------------------------------------------------------------------------

class TensorParallelModules : public ::testing::TestWithParam<TensorLayout> {};

TEST_P(TensorParallelModules, TrainAsOnOneRank) {
  const auto got = run_on_ranks<GptOfModules>(GetParam());
  expect_close(got, run_on_ranks<GptOfModules>({1}));
  expect_same(run_on_ranks<GptOfModules>(GetParam()), got);
}

INSTANTIATE_TEST_SUITE_P(Layouts, TensorParallelModules,
                         ::testing::Values(TensorLayout{2}, TensorLayout{4}, TensorLayout{2, 2},
                                           TensorLayout{4, 2}, TensorLayout{2, 1, 2},
                                           TensorLayout{4, 1, 2, true},
                                           TensorLayout{2, 2, 2, true}));

/// A layout, the configuration's preference, and whether layers run again in the backward pass.
using GptCase = std::tuple<TensorLayout, std::string, bool>;

class TensorParallelGpt : public ::testing::TestWithParam<GptCase> {};

TEST_P(TensorParallelGpt, TrainsAsPlainLibtorch) {
  const auto& [layout, optimize, recompute] = GetParam();
  const std::string favoured = optimize;
  const bool again = recompute;
  const auto got = run_on_ranks<GptOfModules>(
      layout,
      [&](GptOfModules& net) {
        if (again) recompute_layers(net);
      },
      [&](Config config) { return config.optimize(favoured); });
  expect_close(got, run_plain_gpt());
  // Words, and in each layer four weights and the biases of two.
  EXPECT_EQ(got.divided.size(), 1u + kLayers * 6);
}

INSTANTIATE_TEST_SUITE_P(Layouts, TensorParallelGpt,
                         ::testing::Combine(::testing::Values(TensorLayout{4}, TensorLayout{2, 2}),
                                            ::testing::Values("speed", "memory"),
                                            ::testing::Bool()));

/// The second half of a backward pass gathers inputs again, in its turn on all ranks.
TEST(TensorParallelGpt, TrainsWithSplitBackwardPasses) {
  const auto got = run_on_ranks<GptOfModules>(
      {2, 2}, [](GptOfModules&) {}, [](Config config) { return config.pipeline("zb_h1"); });
  expect_close(got, run_plain_gpt());
  expect_same(got, run_on_ranks<GptOfModules>({2, 2}));
}

// ---------------------------------------------------------------------------------------------
// Calls outside a step

/// The ranks of the group compute together, on one batch, and differentiate as autograd does. They
/// drop the same activations, those of the streams of the call.
TEST(DividedModules, MayBeCalledOutsideAStep) {
  const TensorLayout layout{2};
  const auto batch = token_batch(3);
  const auto plain = make_model<PlainModel>(5);
  run_as_threads(layout.ranks(), config_of(layout), [&] {
    torch::set_num_threads(1);
    const auto net = make_model<DividedModel>(5);
    ModelOf<DividedModel> model(net);
    auto evaluate = step([&](torch::Tensor x, torch::Tensor y) { return net->loss(x, y); });
    evaluate(own_batch(layout, batch[0]), own_batch(layout, batch[1]));
    for (uint64_t call = 0; call < 2; ++call) {
      model->zero_grad();
      const auto got = model(batch[0]);
      got.square().sum().backward();
      static std::mutex mutex;
      const std::lock_guard lock(mutex);
      plain->zero_grad();
      torch::Tensor expected;
      {
        const KeyedRandom random(kSeed, "model(x)", call, 0);
        expected = plain->forward(batch[0]);
      }
      expected.square().sum().backward();
      testing::expect_close(got, expected, "outputs");
      for (const auto& item : net->named_parameters()) {
        const auto& entry = runtime::Runtime::get().table().at(item.value());
        const auto whole = plain->named_parameters()[item.key()].grad();
        const auto own = entry.part().cut(whole, rank());
        testing::expect_close(item.value().grad(), own, item.key());
      }
    }
  });
}

/// The error of calls outside a step, after one step or before it.
std::string error_of_call(bool after_a_step) {
  const TensorLayout layout{2};
  return error_of_run<UsageError>(2, config_of(layout), [&] {
    const auto net = make_model<DividedModel>(5);
    ModelOf<DividedModel> model(net);
    const auto batch = token_batch(0);
    const auto own = own_batch(layout, batch[0]);
    auto evaluate = step([&](torch::Tensor x, torch::Tensor y) { return net->loss(x, y); });
    if (after_a_step) evaluate(own, own_batch(layout, batch[1]));
    model(own);
  });
}

TEST(DividedModules, AreAlikeAfterTheFirstStep) {
  expect_has(error_of_call(false),
             {"a DistributedModel whose layers are divided among the ranks of a tensor-parallel "
              "group was called before the first step, which makes what they share alike"});
}

TEST(DividedModules, AreGivenOneBatchOutsideAStep) {
  const auto text = error_of_call(true);
  expect_has(text,
             {"a DistributedModel was called outside a step function with other tensors on tp "
              "rank 1 than on tp rank 0. Its layers are divided among the ranks of a "
              "tensor-parallel group, which work on one batch together: give all of them the "
              "same"});
}

/// Modules that were divided by rewriting know nothing of the other ranks.
TEST(DividedModules, AreTheOnlyOnesThatMayBeCalledInParts) {
  const TensorLayout layout{2};
  const auto text = error_of_run<UsageError>(2, config_of(layout), [&] {
    const auto net = make_model<PlainModel>(5);
    set_tensor_parallelism(*net);
    ModelOf<PlainModel> model(net);
    const auto batch = token_batch(0);
    model(batch[0]);  // every rank still has all of it
    auto loss = step([&](torch::Tensor x, torch::Tensor y) { return net->loss(x, y); });
    loss(own_batch(layout, batch[0]), own_batch(layout, batch[1]));
    model(batch[0]);
  });
  expect_has(text, {"its parameters lie on several ranks. Call it inside smp::step(",
                    "or gather them by model->cpu()"});
}

}  // namespace
}  // namespace smp
