#include <gtest/gtest.h>
#include <torch/torch.h>

#include "nn/nn.h"
#include "tests/smp/tensor_parallel_run.h"

// A language model made of the modules of smp::nn, on ranks that divide it, against one rank, where
// they are plain layers.
namespace smp {
namespace {

using namespace testing;

struct GptOfModules : torch::nn::Module {
  GptOfModules() {
    gpt = register_module(
        "gpt", nn::DistributedTransformerLMHead(nn::DistributedTransformerLMHeadOptions()
                                                    .num_layers(2)
                                                    .num_attention_heads(4)
                                                    .attention_head_size(4)
                                                    .hidden_size(16)
                                                    .intermediate_size(32)
                                                    .vocab_size(12)
                                                    .num_positions(DividedModel::kLength)
                                                    .causal_mask_size(DividedModel::kLength)
                                                    .initializer_range(0.3)
                                                    .use_normal_initialization(true)
                                                    .pre_layernorm(true)));
  }

  torch::Tensor loss(torch::Tensor ids, torch::Tensor targets) {
    return gpt->forward(nn::DistributedTransformerLMHeadImpl::Five{ids, {}, {}, {}, targets});
  }

  nn::DistributedTransformerLMHead gpt{nullptr};
};

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

}  // namespace
}  // namespace smp
