// SPDX-License-Identifier: Apache-2.0
#include "examples/gpt/gpt_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "examples/gpt/sampler.h"
#include "tests/error_of.h"

namespace gpt {
namespace {

using smp::testing::error_of;

GPTOptions small() { return GPTOptions().layers(2).width(16).heads(2).sequence(12).dropout(0.1); }

class GptModel : public testing::Test {
 protected:
  GptModel() {
    at::set_num_threads(1);
    torch::manual_seed(0);
  }

  torch::Tensor bytes_ = torch::randint(0, kVocabulary, {3, 12}, torch::kLong);
};

TEST_F(GptModel, MapsBytesToLogitsOfTheNextByte) {
  EXPECT_EQ(GPT(small())(bytes_).sizes(), (std::vector<int64_t>{3, 12, 256}));
  EXPECT_EQ(GPT(small())(bytes_.narrow(1, 0, 5)).sizes(), (std::vector<int64_t>{3, 5, 256}));
}

TEST_F(GptModel, LaterBytesDoNotChangeEarlierLogits) {
  GPT net(small());
  net->eval();
  const auto before = net(bytes_);
  auto changed = bytes_.clone();
  changed.select(1, 7).add_(1).remainder_(kVocabulary);
  const auto after = net(changed);
  EXPECT_TRUE(torch::equal(before.narrow(1, 0, 7), after.narrow(1, 0, 7)));
  EXPECT_FALSE(torch::equal(before.narrow(1, 7, 1), after.narrow(1, 7, 1)));
  EXPECT_FALSE(torch::equal(before.narrow(1, 11, 1), after.narrow(1, 11, 1)));
}

// The attention, written out with a mask and a softmax, is the oracle.
TEST_F(GptModel, AttentionIsSoftmaxOverEarlierPositions) {
  const auto options = small();
  Attention attention(options);
  attention->eval();
  const auto x = torch::randn({2, 6, 16});
  const auto parameters = attention->named_parameters();
  const auto qkv = torch::linear(x, parameters["qkv.weight"], parameters["qkv.bias"]).split(16, -1);
  const auto later = torch::ones({6, 6}, torch::kBool).triu(1);
  std::vector<torch::Tensor> heads;
  for (int64_t head = 0; head < 2; ++head) {
    const auto part = [&](int64_t i) { return qkv[i].narrow(2, head * 8, 8); };
    const auto scores = part(0).matmul(part(1).transpose(1, 2)) / std::sqrt(8.0);
    heads.push_back(torch::softmax(scores.masked_fill(later, -INFINITY), -1).matmul(part(2)));
  }
  const auto expected =
      torch::linear(torch::cat(heads, -1), parameters["out.weight"], parameters["out.bias"]);
  EXPECT_TRUE(torch::allclose(attention(x), expected, 1e-4, 1e-6));
}

TEST_F(GptModel, TiedHeadHasNoWeightOfItsOwn) {
  const int64_t head = kVocabulary * 16;
  const auto count = [](GPT net) {
    int64_t sum = 0;
    for (const auto& parameter : net->parameters()) sum += parameter.numel();
    return sum;
  };
  EXPECT_EQ(count(GPT(small())) - count(GPT(small().tied(true))), head);
  GPT tied(small().tied(true));
  EXPECT_EQ(tied(bytes_).size(2), kVocabulary);
}

// Logits of variance one cost about half a nat more than the uniform distribution does.
TEST_F(GptModel, StartsNearTheUniformDistribution) {
  for (const bool tied : {false, true}) {
    GPT net(small().tied(tied));
    net->eval();
    const double loss = next_byte_loss(net(bytes_), torch::randint(0, 256, {3, 12})).item<double>();
    EXPECT_NEAR(loss, std::log(256.0) + 0.5, 0.4) << "tied: " << tied;
  }
}

TEST_F(GptModel, LossIsTheMeanOfMinusLogProbability) {
  const auto logits = torch::randn({2, 3, 256});
  const auto next = torch::randint(0, 256, {2, 3}, torch::kLong);
  double sum = 0;
  for (int64_t row = 0; row < 2; ++row) {
    for (int64_t i = 0; i < 3; ++i) {
      const auto of = logits[row][i].to(torch::kDouble);
      sum += of.exp().sum().log().item<double>() - of[next[row][i]].item<double>();
    }
  }
  EXPECT_NEAR(next_byte_loss(logits, next).item<double>(), sum / 6, 1e-5);
}

TEST_F(GptModel, RefusesAWidthThatHeadsCannotShare) {
  EXPECT_THAT(error_of<std::exception>([] { GPT(small().heads(3)); }),
              testing::HasSubstr("expected a width that is a multiple of heads (3), got 16. Change "
                                 "--width or --heads."));
}

// A model that is sure that byte b is followed by b + 1 must continue "a" with "bcd".
TEST(GptSampler, FollowsTheModel) {
  const auto successor = [](const at::Tensor& x) {
    EXPECT_EQ(x.sizes(), (std::vector<int64_t>{1, 4}));
    return torch::one_hot((x + 1).remainder(256), 256).to(torch::kFloat) * 1000;
  };
  EXPECT_EQ(sample_text(successor, "a", 6, /*sequence=*/4, /*seed=*/1), "bcdefg");
  EXPECT_THAT(error_of<std::exception>([&] { sample_text(successor, "", 1, 4, 1); }),
              testing::HasSubstr("expected a prompt of at least one byte"));
}

TEST(GptSampler, TheSeedDecides) {
  const auto uniform = [](const at::Tensor& x) { return torch::zeros({1, x.size(1), 256}); };
  const auto sample = [&](uint64_t seed) { return sample_text(uniform, "a", 20, 4, seed); };
  EXPECT_EQ(sample(1), sample(1));
  EXPECT_NE(sample(1), sample(2));
}

}  // namespace
}  // namespace gpt
