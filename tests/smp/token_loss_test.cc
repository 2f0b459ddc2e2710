// SPDX-License-Identifier: Apache-2.0
// Losses over tokens: the gradient is that of the mean over all tokens of the step, as one process
// computes it of the whole batch.

#include <gmock/gmock.h>

#include <mutex>
#include <ostream>

#include "tests/smp/api.h"

namespace smp::testing {
namespace {

namespace F = torch::nn::functional;
using ::testing::HasSubstr;

constexpr int64_t kBatch = 8, kLength = 5, kClasses = 3, kIgnored = -100;

struct TaggerImpl : torch::nn::Module {
  TaggerImpl() {
    in = register_module("in", torch::nn::Linear(4, 6));
    out = register_module("out", torch::nn::Linear(6, kClasses));
    to(torch::kDouble);
  }
  /// Scores of each token of each sample.
  torch::Tensor forward(torch::Tensor x) { return out(torch::tanh(in(x))); }

  torch::nn::Linear in{nullptr}, out{nullptr};
};
TORCH_MODULE(Tagger);

Tagger make_tagger() {
  static std::mutex mutex;  // rank threads share the default generator
  const std::lock_guard<std::mutex> lock(mutex);
  torch::manual_seed(5);
  return Tagger();
}

torch::Tensor sum_of_losses(const torch::Tensor& scores, const torch::Tensor& targets) {
  return F::cross_entropy(scores.flatten(0, 1), targets.flatten(),
                          F::CrossEntropyFuncOptions().reduction(torch::kSum));
}

struct TokenLayout {
  std::string name;
  int ranks;
  Config config;
};

std::ostream& operator<<(std::ostream& out, const TokenLayout& layout) {
  return out << layout.name;
}

struct TokenResult {
  torch::Tensor loss;
  Named gradients;
};

class TokenLoss : public ::testing::TestWithParam<TokenLayout> {
 protected:
  void SetUp() override {
    torch::set_num_threads(1);
    torch::manual_seed(3);
    x_ = torch::randn({kBatch, kLength, 4}, torch::kDouble);
    // Each sample has another number of tokens, one has none.
    y_ = torch::randint(kClasses, {kBatch, kLength});
    for (int64_t i = 0; i < kBatch; ++i) y_[i].narrow(0, i % 6, kLength - i % 6).fill_(kIgnored);
  }

  /// One process, which sees the whole batch.
  TokenResult plain() const {
    Tagger net = make_tagger();
    TokenResult result;
    result.loss = F::cross_entropy(net(x_).flatten(0, 1), y_.flatten());
    result.loss.backward();
    for (const auto& item : net->named_parameters()) {
      result.gradients[item.key()] = item.value().grad();
    }
    return result;
  }

  /// `passes` calls, each with a part of the batch, whose gradients add up.
  TokenResult run(const TokenLayout& layout, int passes = 1) const {
    TokenResult result;
    std::mutex mutex;
    run_as_threads(layout.ranks, layout.config, [&] {
      DistributedModel<Tagger> model(make_tagger(),
                                     ModelOptions().backward_passes_per_step(passes));
      auto train = step([&](torch::Tensor x, torch::Tensor y, torch::Tensor tokens) {
        auto loss = mean_over_tokens(sum_of_losses(model(x), y), tokens);
        model->backward(loss);
        return loss;
      });
      // The ranks of a tensor-parallel group have one batch with "prescaled_batch".
      const bool is_one = layout.config.prescaled_batch();
      const int count = is_one ? rdp_size() : dp_size(), mine = is_one ? rdp_rank() : dp_rank();
      const auto x = part(x_, count, mine), y = part(y_, count, mine);
      const auto tokens = count_tokens(y.ne(kIgnored));
      EXPECT_EQ(tokens.item<int64_t>(), y_.ne(kIgnored).sum().item<int64_t>());
      auto loss = torch::zeros({}, torch::kDouble);
      for (int i = 0; i < passes; ++i) {
        loss += train(part(x, passes, i), part(y, passes, i), whole(tokens))
                    .reduce_mean(CommGroup::kDp);
      }
      const std::lock_guard<std::mutex> lock(mutex);
      if (rank() == 0) result.loss = loss;
      if (dp_rank() > 0) return;
      for (const auto& item : model->local_named_parameters()) {
        result.gradients[item.key()] = item.value().grad().clone();
      }
    });
    return result;
  }

  torch::Tensor x_, y_;
};

void expect_near_result(const TokenResult& got, const TokenResult& expected) {
  EXPECT_TRUE(torch::allclose(got.loss, expected.loss, 1e-12, 1e-14));
  ASSERT_EQ(got.gradients.size(), expected.gradients.size());
  for (const auto& [name, gradient] : expected.gradients) {
    EXPECT_TRUE(torch::allclose(got.gradients.at(name), gradient, 1e-12, 1e-14)) << name;
  }
}

Config cut(int64_t microbatches) { return stages(1).microbatches(microbatches); }

const TokenLayout kAlone{"Alone", 1, cut(4).gradient_shards(2)};

/// Up to rounding: one sum over the batch is not the sum of those of its microbatches.
TEST_P(TokenLoss, IsTheMeanOverTheTokensOfTheWholeBatch) {
  expect_near_result(run(GetParam()), plain());
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, TokenLoss,
    ::testing::Values(kAlone, TokenLayout{"Stages", 2, cut(4).partitions(2)},
                      TokenLayout{"StagesAndReplicas", 4, cut(2).partitions(2).ddp(true)},
                      TokenLayout{"MicrobatchesThatDoNotDivide", 2, cut(3).ddp(true)},
                      TokenLayout{"LayersDivided", 2, cut(2).ddp(true).tensor_parallel_degree(2)},
                      TokenLayout{"LayersDividedOneBatch", 2,
                                  cut(2).ddp(true).tensor_parallel_degree(2).prescaled_batch(true)},
                      TokenLayout{"MicrobatchesTogether", 2,
                                  cut(4).partitions(2).numerics("fast")}),
    [](const auto& info) { return info.param.name; });

using TokenLosses = TokenLoss;

/// Losses are those of the same microbatches, on any number of ranks.
TEST_F(TokenLosses, HaveTheBitsOfOneProcess) {
  const TokenResult alone = run(kAlone);
  for (const TokenLayout& layout :
       {TokenLayout{"stages", 2, cut(4).partitions(2).gradient_shards(2)},
        TokenLayout{"both", 4, cut(2).partitions(2).ddp(true)}}) {
    const TokenResult got = run(layout);
    expect_equal(got.loss, alone.loss, layout.name);
    expect_equal(got.gradients, alone.gradients, layout.name);
  }
}

/// The tokens are then those of all calls.
TEST_F(TokenLosses, AddUpOverSeveralCalls) {
  expect_near_result(run({"stages", 2, cut(2).partitions(2)}, /*passes=*/2), plain());
}

TEST_F(TokenLosses, AreZeroWithoutTokens) {
  y_.fill_(kIgnored);
  run_as_threads(2, cut(2).ddp(true), [&] {
    EXPECT_EQ(count_tokens(y_.ne(kIgnored)).item<int64_t>(), 1);
    EXPECT_EQ(count_tokens(torch::full({2}, 0.25)).item<float>(), 1);  // weights, of both ranks
    EXPECT_EQ(mean_over_tokens(torch::zeros({}), count_tokens(y_.ne(kIgnored))).item<float>(), 0);
  });
}

TEST_F(TokenLosses, RefuseAModelWhoseGradientsAreSums) {
  const auto text = error_of_run<UsageError>(1, cut(2), [&] {
    DistributedModel<Tagger> model(make_tagger(),
                                   ModelOptions().average_grads_across_microbatches(false));
    auto evaluate = step([&](torch::Tensor x, torch::Tensor y, torch::Tensor tokens) {
      return mean_over_tokens(sum_of_losses(model(x), y), tokens);
    });
    evaluate(x_, y_, whole(count_tokens(y_.ne(kIgnored))));
  });
  EXPECT_THAT(text,
              HasSubstr("smp::mean_over_tokens: the gradients of a model are summed over "
                        "microbatches, not averaged. Leave out "
                        "ModelOptions().average_grads_across_microbatches(false), or divide the "
                        "loss by the number of tokens yourself"));
}

}  // namespace
}  // namespace smp::testing
