// SPDX-License-Identifier: Apache-2.0

#include "tests/nn/rewrite/rule_cases.h"

namespace smp::nn::rewrite::testing {

std::vector<Case> product_cases() {
  return {
      {"ColumnThenRow",
       {{"up", {0, 1}}},
       [](Weights& w, const Tensors& in) {
         const auto h = torch::gelu(torch::linear(in[0] * w->scale, w->up, w->up_bias));
         return torch::linear(h, w->down, w->down_bias);
       },
       "copy reduce"},
      {"RowAlone",
       {{"up", {1, 1}}},
       [](Weights& w, const Tensors& in) {
         return torch::linear(in[0] * w->scale, w->up, w->up_bias);
       },
       "scatter reduce"},
      {"ColumnThenColumn",
       {{"up", {0, 1}}, {"down", {0, 1}}},
       [](Weights& w, const Tensors& in) {
         return torch::linear(torch::linear(in[0] * w->scale, w->up), w->down, w->down_bias);
       },
       "copy all_gather gather gather"},
      {"Matmul",
       {{"right", {1, 1}}},
       [](Weights& w, const Tensors& in) {
         return in[0].mul(w->scale).matmul(w->right).matmul(w->left);
       },
       "copy reduce"},
      {"Transposed",
       {{"up", {0, 1}}, {"down", {1, 1}}},
       [](Weights& w, const Tensors& in) {
         return in[0].mul(w->scale).matmul(w->up.t()).relu().matmul(w->down.t());
       },
       "copy reduce"},
      {"WeightOnTheLeft",
       {{"up", {0, 1}}},
       [](Weights& w, const Tensors& in) {
         return w->up.matmul(in[0].mul(w->scale)[0].t()).relu();
       },
       kDivided},
      {"Vector",
       {{"up", {0, 1}}, {"row", {0, 1}}},
       [](Weights& w, const Tensors& in) {
         return torch::linear(in[0] * w->scale, w->up).matmul(w->row);
       },
       "copy reduce"},
      on_hidden(
          "VectorTimesBatch", 1,
          [](Weights&, Tensor h) { return torch::arange(kLength, doubles()).matmul(by_head(h)); },
          kDivided),
      // The written value is seen through the view.
      {"AddmmInPlace",
       {{"right", {1, 1}}},
       [](Weights& w, const Tensors& in) {
         const auto x = in[0].mul(w->scale).flatten(0, 1);
         auto sum = x.clone();
         const auto view = sum.view({kBatch, kLength, kWidth});
         sum.addmm_(x.matmul(w->right).relu(), w->left);
         return view.exp();
       },
       "copy gather"},
      {"Addmm",
       {{"right", {1, 1}}},
       [](Weights& w, const Tensors& in) {
         const auto h = torch::addmm(w->up_bias, in[0].mul(w->scale).flatten(0, 1), w->right);
         return torch::addmm(w->down_bias, h.relu(), w->left, 1, 2);
       },
       "copy reduce"},
      on_hidden(
          "Attention", 3,
          [](Weights&, Tensor h) {
            const auto qkv = heads_of(h);
            const auto scores = qkv[0].matmul(qkv[1].transpose(-2, -1)) / 2.0;
            return scores.softmax(-1).matmul(qkv[2]);
          },
          kDivided),
      on_hidden(
          "AttentionInOneDimension", 3,
          [](Weights&, Tensor h) {
            std::vector<Tensor> parts;
            for (const auto& part : h.transpose(0, 1).chunk(3, -1)) {
              parts.push_back(part.contiguous().view({kLength, kBatch * 4, 4}).transpose(0, 1));
            }
            const auto zeros = torch::zeros({1, kLength, kLength}, doubles());
            const auto scores = torch::baddbmm(zeros, parts[0], parts[1].mT(), 1, 0.5);
            return torch::bmm(scores.softmax(-1), parts[2])
                .transpose(0, 1)
                .reshape({kLength, kBatch, 16});
          },
          kDivided),
      on_hidden(
          "HeadsThatAreCut", 3,
          [](Weights&, Tensor h) {
            const auto parts = h.chunk(3, -1);
            return torch::bmm(parts[0], parts[1].transpose(1, 2)).softmax(-1).bmm(parts[2]);
          },
          "copy gather gather copy gather gather"),
      on_hidden(
          "Fused", 3,
          [](Weights&, Tensor h) {
            const auto qkv = heads_of(h);
            return torch::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0.0, true);
          },
          kDivided),
      on_hidden(
          "FusedWithDropout", 3,
          [](Weights&, Tensor h) {
            const auto qkv = heads_of(h);
            return torch::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0.3, true);
          },
          "copy dropout gather gather"),
      on_hidden(
          "FusedWithMasks", 3,
          [](Weights& w, Tensor h) {
            const auto qkv = heads_of(h);
            const auto visible = torch::ones({kLength, kLength}, torch::kBool).tril(1);
            const auto bias = torch::ones({1, 4, 1, kLength}, doubles()) * w->scale;
            return torch::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], visible, 0.2) +
                   torch::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], bias, 0.1, false,
                                                       0.7);
          },
          "copy dropout scatter dropout gather gather"),
      on_hidden(
          "GroupedQueries", 1,
          [](Weights&, Tensor h) {
            const auto q = by_head(h);
            const auto k = h.slice(1, 0, 4).view({kBatch, 4, 4, 12}).transpose(1, 2);
            return torch::scaled_dot_product_attention(q, k, k, {}, 0.0, false, std::nullopt, true);
          },
          kDivided),
      {"Convolution",
       {{"kernel", {0, 1}}},
       [](Weights& w, const Tensors& in) {
         const auto x = torch::conv1d(in[3] * w->scale, w->kernel, w->kernel_bias, 1, 1).relu();
         return torch::conv1d(x, w->next_kernel, w->next_bias);
       },
       "copy reduce"},
      {"ConvolutionWithoutBias",
       {{"next_kernel", {1, 1}}},
       [](Weights& w, const Tensors& in) {
         return torch::conv1d(torch::cat({in[3], in[3]}, 1) * w->scale, w->next_kernel);
       },
       "scatter reduce"},
      {"EmbeddingRows",
       {{"table", {0, 1}}},
       [](Weights& w, const Tensors& in) { return torch::embedding(w->table, in[1], 3); },
       "embedding reduce"},
      {"EmbeddingColumns",
       {{"table", {1, 1}}},
       [](Weights& w, const Tensors& in) { return torch::embedding(w->table, in[1]); },
       "gather gather"},
  };
}

}  // namespace smp::nn::rewrite::testing
