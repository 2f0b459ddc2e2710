// SPDX-License-Identifier: Apache-2.0
// FlashAttentionLayer, against attention written out.

#include "smp/nn/flash_attention.h"

#include <cmath>
#include <limits>

#include "graph/keyed_random.h"
#include "tests/nn/modules.h"

namespace smp::nn::testing {
namespace {

constexpr int64_t kSequences = 2, kPositions = 5, kHeadCount = 4, kHeadSize = 3;

torch::Tensor make_qkv() {
  torch::manual_seed(1);
  return torch::randn({kSequences, kPositions, 3, kHeadCount, kHeadSize}, torch::kDouble);
}

torch::Tensor make_mask() {
  torch::manual_seed(2);
  return torch::randn({kSequences, 1, 1, kPositions}, torch::kDouble);
}

/// softmax(scale Q K^T + bias) V, loop by loop.
torch::Tensor written_out(const torch::Tensor& qkv, const torch::Tensor& bias, double scale) {
  const auto parts = qkv.permute({2, 0, 3, 1, 4});
  auto result = torch::zeros({kSequences, qkv.size(3), kPositions, kHeadSize}, torch::kDouble);
  for (int64_t n = 0; n < kSequences; ++n) {
    for (int64_t h = 0; h < qkv.size(3); ++h) {
      for (int64_t i = 0; i < kPositions; ++i) {
        std::vector<double> weights(kPositions);
        double sum = 0;
        for (int64_t j = 0; j < kPositions; ++j) {
          const double dot = (parts[0][n][h][i] * parts[1][n][h][j]).sum().item<double>();
          weights[j] = std::exp(scale * dot + bias[n][h][i][j].item<double>());
          sum += weights[j];
        }
        for (int64_t j = 0; j < kPositions; ++j) {
          result[n][h][i] += parts[2][n][h][j] * (weights[j] / sum);
        }
      }
    }
  }
  return result;
}

torch::Tensor no_bias() {
  return torch::zeros({kSequences, kHeadCount, kPositions, kPositions}, torch::kDouble);
}

torch::Tensor causal_bias() {
  return no_bias() + torch::full({kPositions, kPositions}, -std::numeric_limits<double>::infinity(),
                                 torch::kDouble)
                         .triu(1);
}

/// Minus the distance, by a slope that is halved from head to head: 2^-2, 2^-4 ... for four heads.
torch::Tensor linear_bias() {
  auto bias = no_bias();
  for (int64_t h = 0; h < kHeadCount; ++h) {
    for (int64_t i = 0; i < kPositions; ++i) {
      for (int64_t j = 0; j < kPositions; ++j) {
        bias.select(1, h).select(1, i).select(1, j).fill_(-std::abs(static_cast<double>(i - j)) *
                                                          std::pow(2.0, -2.0 * (h + 1)));
      }
    }
  }
  return bias;
}

void expect_close_values(const torch::Tensor& got, const torch::Tensor& expected) {
  ASSERT_EQ(got.sizes(), expected.sizes());
  EXPECT_TRUE(torch::allclose(got, expected, 1e-10, 1e-12)) << (got - expected).abs().max();
}

FlashAttentionLayerOptions without_dropout() {
  return FlashAttentionLayerOptions().attention_dropout_prob(0);
}

TEST(FlashAttentionLayer, IsAttention) {
  const auto qkv = make_qkv(), mask = make_mask();
  const double scale = 1 / std::sqrt(3.0);
  FlashAttentionLayer layer(without_dropout());
  expect_close_values(layer(qkv), written_out(qkv, no_bias(), scale));
  expect_close_values(layer(qkv, torch::Tensor(), true), written_out(qkv, causal_bias(), scale));
  expect_close_values(layer(qkv, mask), written_out(qkv, no_bias() + mask, scale));
  expect_close_values(layer(qkv, mask, true), written_out(qkv, causal_bias() + mask, scale));
}

TEST(FlashAttentionLayer, ScalesAndBiases) {
  const auto qkv = make_qkv();
  const double usual = 1 / std::sqrt(3.0);
  on_ranks(1, [&](int) {
    const auto result = [&](const FlashAttentionLayerOptions& options) {
      return FlashAttentionLayer(options)->forward(qkv);
    };
    expect_close_values(result(without_dropout().scale_attention_scores(false)),
                        written_out(qkv, no_bias(), 1));
    expect_close_values(result(without_dropout().scale_attn_by_layer_idx(true).layer_idx(3)),
                        written_out(qkv, no_bias(), usual / 4));
    expect_close_values(result(without_dropout().layer_idx(3).scale(0.7)),
                        written_out(qkv, no_bias(), 0.7));
    expect_close_values(result(without_dropout().use_alibi(true)),
                        written_out(qkv, linear_bias(), usual));
  });
}

/// Where half precision does not hold the positions, their distances are right all the same.
TEST(FlashAttentionLayer, BiasesOfLongSequencesInHalfPrecision) {
  torch::manual_seed(5);
  constexpr int64_t kTokens = 600;
  const auto qkv = torch::zeros({1, kTokens, 3, kHeadCount, 2}, torch::kDouble);
  qkv.select(2, 2).uniform_(-1, 1);
  FlashAttentionLayer layer(without_dropout().use_alibi(true));
  on_ranks(1, [&](int) {
    const auto expected = layer(qkv);  // like `ScalesAndBiases`
    for (const auto type : {torch::kBFloat16, torch::kHalf}) {
      const auto difference = (layer(qkv.to(type)).to(torch::kDouble) - expected).abs().max();
      EXPECT_LT(difference.item<double>(), 0.02) << type;
    }
  });
}

/// Each rank has its part of the heads: with the biases, and the masks of dropout, of one process.
TEST(FlashAttentionLayer, OfDividedHeads) {
  const auto qkv = make_qkv(), mask = make_mask();
  const auto options = FlashAttentionLayerOptions().attention_dropout_prob(0.4).use_alibi(true);
  std::vector<torch::Tensor> whole(2);
  for (int ranks : {1, 2}) {
    Tensors evaluated(ranks), trained(ranks);
    on_ranks(ranks, [&](int rank) {
      FlashAttentionLayer layer(options);
      const auto mine = part_of(qkv, 3, 1, ranks, rank);
      graph::KeyedRandomScope random(graph::RandomKey{7, 0, 3, 5});
      trained[rank] = layer(mine, mask, true);
      layer->eval();
      evaluated[rank] = layer(mine, mask, true);
    });
    if (ranks == 1) {
      whole = {evaluated[0], trained[0]};
      EXPECT_FALSE(torch::allclose(whole[0], whole[1]));
      continue;
    }
    expect_close_values(whole_of(evaluated, 1), whole[0]);
    expect_close_values(whole_of(trained, 1), whole[1]);
  }
}

TEST(FlashAttentionLayer, RefusesWhatDoesNotFit) {
  expect_has(error_of<UsageError>(
                 [] { FlashAttentionLayer(without_dropout().scale_attn_by_layer_idx(true)); }),
             {"scale_attn_by_layer_idx needs layer_idx, the number of the layer from 0. Set it"});
  const auto text = error_of<UsageError>(
      [] { FlashAttentionLayer(without_dropout().attention_head_size(8))->forward(make_qkv()); });
  expect_has(text, {"expected [N, S, 3, heads, 8], got [2, 5, 3, 4, 3]. Stack queries, keys and"});
}

}  // namespace
}  // namespace smp::nn::testing
