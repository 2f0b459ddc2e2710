// SPDX-License-Identifier: Apache-2.0
// The options of smp::tensor_parallelism, for models that know nothing of it.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <set>
#include <string>

#include "runtime/parameters/scope_notes.h"
#include "tests/smp/models.h"
#include "tests/smp/tensor_parallel_run.h"

namespace smp::testing {
namespace {

using Options = TensorParallelismOptions;

std::function<void(UntiedGpt&)> marked_with(const Options& options) {
  return [options](UntiedGpt& net) { set_tensor_parallelism(net, true, options); };
}

TEST(TensorParallelOptions, KeepWhatTheModelComputes) {
  const auto plain = run_plain<UntiedGpt>();
  for (const Options& options :
       {Options().attention_in_fp32(true), Options().query_key_layer_scaling(true),
        Options().flash_attention(false), Options().distribute_embedding(false)}) {
    const auto got = run_on_ranks<UntiedGpt>({2}, marked_with(options));
    expect_close(got, plain);
    EXPECT_EQ(got.divided.count("attention_in0.weight"), 1u);
    const bool tables = options.distribute_embedding();
    EXPECT_EQ(got.divided.count("tokens.weight"), tables ? 1u : 0u);
    const std::string reason =
        "whole: it is a table of embeddings, and distribute_embedding is "
        "false";
    EXPECT_EQ(got.report.find(reason) == std::string::npos, tables) << got.report;
  }
}

/// The error of the first step of a marked net.
template <class Net>
std::string error_of_step(const TensorLayout& layout, const Options& options) {
  return error_of_run<UsageError>(layout.ranks(), config_of(layout), [&] {
    const auto net = make_model<Net>(5);
    set_tensor_parallelism(*net, true, options);
    ModelOf<Net> model(net);
    auto evaluate = step([&](torch::Tensor x, torch::Tensor y) { return net->loss(x, y); });
    const auto batch = token_batch(0);
    evaluate(own_batch(layout, batch[0]), own_batch(layout, batch[1]));
  });
}

TEST(TensorParallelOptions, AreRefusedWhereTheyWouldBeLost) {
  const auto in_fp32 = Options().attention_in_fp32(true);
  expect_has(error_of_step<UntiedGpt>({1}, in_fp32),
             {"parameter \"",
              "was made with options of operators (attention_in_fp32, "
              "query_key_layer_scaling, use_alibi, fp32_residual_addition or flash_attention of "
              "smp::tensor_parallelism), which only layers that ranks divide can "
              "follow. Set \"tensor_parallel_degree\", or mark with "
              "smp::tensor_parallelism(smp::tp_size() > 1, options)"});
  expect_has(error_of_step<PlainModel>({2}, in_fp32),
             {"smp::tensor_parallelism was given options of attention",
              "but nothing that was made with them calls scaled_dot_product_attention. Modules of "
              "smp::nn have these options themselves"});
  // Two heads.
  expect_has(error_of_step<UntiedGpt>({4}, in_fp32),
             {"attention in or after module \"",
              "cannot be computed as the options of "
              "smp::tensor_parallelism say, since it is not "
              "divided among the 4 ranks"});
}

/// A residual of sizes that two ranks cannot divide.
struct Odd : torch::nn::Module {
  Odd() {
    tokens = register_module("tokens", torch::nn::Embedding(DividedModel::kVocabulary, 3));
    fc = register_module("fc", torch::nn::Linear(3, 3));
  }
  torch::Tensor loss(torch::Tensor ids, torch::Tensor /*targets*/) {
    const auto x = tokens(ids).to(torch::kHalf);
    return (x + fc(x.to(fc->weight.scalar_type())).to(torch::kHalf)).sum();
  }
  torch::nn::Embedding tokens{nullptr};
  torch::nn::Linear fc{nullptr};
};

TEST(TensorParallelOptions, OfResidualsAreRefusedWhereTheyWouldBeLost) {
  const auto wide = Options().fp32_residual_addition(true);
  expect_has(error_of_step<PlainModel>({2}, wide),
             {"smp::tensor_parallelism was given fp32_residual_addition, but nothing that was made "
              "with it adds to a value of half precision what products of matrices made of it (x + "
              "f(x), not in place)"});
  expect_has(error_of_step<Odd>({2}, wide),
             {"the residual sum cannot be kept in float32, as "
              "fp32_residual_addition of smp::tensor_parallelism says, since no parameter is "
              "divided among the 2 ranks"});
}

/// Trained in bfloat16: the numbers are tested by //tests/nn/rewrite.
TEST(TensorParallelOptions, ChangeWhatTheModelComputes) {
  const auto run = [](const TensorLayout& layout, const Options& options) {
    return run_on_ranks<UntiedGpt>(layout, [&](UntiedGpt& net) {
      net.to(torch::kBFloat16);
      set_tensor_parallelism(net, true, options);
    });
  };
  const auto plain = run({2}, Options());
  for (const Options& options :
       {Options().fp32_residual_addition(true), Options().use_alibi(true).alibi_bias_max(4)}) {
    const auto got = run({2}, options);
    EXPECT_TRUE(std::any_of(got.weights.begin(), got.weights.end(), [&](const auto& weight) {
      return !torch::equal(weight.second, plain.weights.at(weight.first));
    }));
    expect_same(run({2, 2}, options), got);
  }
}

TEST(TensorParallelOptions, BelongToTheScope) {
  const auto options_of = [](const torch::nn::Linear& layer) {
    return runtime::tensor_parallelism_marks().find(layer->weight)->options;
  };
  const auto scope = tensor_parallelism(true, Options().attention_in_fp32(true));
  EXPECT_TRUE(options_of(torch::nn::Linear(2, 3)).attention_in_fp32());
  {
    const auto inner = tensor_parallelism();
    EXPECT_FALSE(options_of(torch::nn::Linear(2, 3)).changes_attention());
  }
  {
    const auto creation = model_creation(ModelCreationOptions().delayed(false));
    EXPECT_TRUE(options_of(torch::nn::Linear(2, 3)).attention_in_fp32());
  }
  const auto creation = model_creation(
      ModelCreationOptions().delayed(false).tensor_parallelism(true).tensor_parallelism_options(
          Options().flash_attention(false)));
  EXPECT_FALSE(options_of(torch::nn::Linear(2, 3)).flash_attention());
  EXPECT_FALSE(options_of(torch::nn::Linear(2, 3)).attention_in_fp32());
  expect_has(error_of<UsageError>([] {
               const auto scope = model_creation(
                   ModelCreationOptions().delayed(false).tensor_parallelism_options(Options()));
             }),
             {"model_creation: tensor_parallelism_options were given without tensor_parallelism, "
              "which says whether to mark what is made. Set it, too"});
}

}  // namespace
}  // namespace smp::testing
