// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "tests/nn/modules.h"

/// Transformers in plain functions of libtorch, and the variants of a layer that tests go through.
namespace smp::nn::testing {

using torch::Tensor;

constexpr int64_t kHidden = 16, kHeads = 4, kChannels = 6, kInner = 24, kLength = 8, kCross = 6,
                  kBatch = 3;

/// A transformer in plain libtorch. Parameters come by name, as the modules register them.
struct Plain {
  Named& parameters;
  bool pre = false, post = true, causal = false, train = true, alibi = false;
  double attention_dropout = 0, dropout = 0;
  std::string activation = "gelu";

  Tensor at(const std::string& name) const { return parameters.at(name); }

  Tensor linear(const Tensor& x, const std::string& name) const {
    return torch::linear(x, at(name + ".weight"), at(name + ".bias"));
  }

  Tensor norm(const Tensor& x, const std::string& name) const {
    const Tensor mean = x.mean(-1, true), variance = x.var(-1, /*unbiased=*/false, true);
    return (x - mean) / (variance + 1e-5).sqrt() * at(name + ".weight") + at(name + ".bias");
  }

  static Tensor heads(const Tensor& x) {
    return x.view({x.size(0), x.size(1), kHeads, kChannels}).transpose(1, 2);
  }

  Tensor attention(const Tensor& hidden, const Tensor& cross, const Tensor& mask,
                   const std::string& name) const {
    const Tensor x = pre ? norm(hidden, name + ".pre_layernorm") : hidden;
    Tensor q, k, v;
    if (cross.defined()) {
      q = heads(linear(x, name + ".query"));
      const auto both = linear(cross, name + ".key_value").chunk(2, -1);
      k = heads(both[0]);
      v = heads(both[1]);
    } else {
      const auto all = linear(x, name + ".query_key_value").chunk(3, -1);
      q = heads(all[0]);
      k = heads(all[1]);
      v = heads(all[2]);
    }
    Tensor scores = torch::matmul(q, k.transpose(2, 3)) / std::sqrt(kChannels);
    if (mask.defined()) scores = scores + mask;
    if (alibi) {
      for (int64_t i = 0; i < q.size(2); ++i) {
        for (int64_t j = 0; j < k.size(2); ++j) {
          for (int64_t h = 0; h < kHeads; ++h) {
            const double slope = std::pow(2, -8.0 * (h + 1) / kHeads);
            scores.select(3, j).select(2, i).select(1, h).sub_(slope * std::abs(i - j));
          }
        }
      }
    }
    if (causal && !cross.defined()) {
      const auto later = torch::ones({q.size(2), k.size(2)}, torch::kBool).triu(1);
      scores = scores.masked_fill(later, -INFINITY);
    }
    const Tensor probabilities = torch::dropout(scores.softmax(-1), attention_dropout, train);
    const Tensor context = torch::matmul(probabilities, v).transpose(1, 2).flatten(2);
    const Tensor y = hidden + torch::dropout(linear(context, name + ".dense"), dropout, train);
    return post ? norm(y, name + ".layernorm") : y;
  }

  Tensor output(const Tensor& hidden, const std::string& name) const {
    const Tensor x = pre ? norm(hidden, name + ".pre_layernorm") : hidden;
    const Tensor inner = linear(x, name + ".dense1");
    const Tensor active = activation == "relu"   ? torch::relu(inner)
                          : activation == "gelu" ? torch::gelu(inner)
                                                 : torch::gelu(inner, "tanh");
    const Tensor y = hidden + torch::dropout(linear(active, name + ".dense2"), dropout, train);
    return post ? norm(y, name + ".layernorm") : y;
  }

  Tensor layer(Tensor x, const Tensor& cross, const Tensor& mask, const Tensor& cross_mask,
               const std::string& name) const {
    x = attention(x, {}, mask, name + "attention");
    if (cross.defined()) x = attention(x, cross, cross_mask, name + "cross_attention");
    return output(x, name + "output");
  }
};

/// A variant of a layer.
struct Case {
  std::string name;
  bool pre = false, post = true, causal = false, mask = false, cross = false, alibi = false;
  std::string activation = "gelu";
  double attention_dropout = 0, dropout = 0;
  bool train = true;
  int64_t length = kLength;
};

/// All that are tested.
inline std::vector<Case> layer_cases() {
  std::vector<Case> cases(11);
  cases[0].name = "post-norm";
  cases[1].name = "pre-norm, causal";
  cases[1].pre = cases[1].causal = true;
  cases[1].post = false;
  cases[2].name = "both norms, relu";
  cases[2].pre = true;
  cases[2].activation = "relu";
  cases[3].name = "mask";
  cases[3].mask = true;
  cases[4].name = "causal and mask";
  cases[4].mask = cases[4].causal = true;
  cases[5].name = "cross attention";
  cases[5].cross = cases[5].mask = cases[5].causal = true;
  cases[6].name = "linear biases, gelu_new";
  cases[6].activation = "gelu_new";
  cases[6].alibi = cases[6].causal = true;
  cases[7].name = "dropout";
  cases[7].pre = cases[7].causal = true;
  cases[7].attention_dropout = 0.1;
  cases[7].dropout = 0.2;
  cases[8].name = "dropout, masks and cross attention";
  cases[8].mask = cases[8].causal = cases[8].cross = true;
  cases[8].attention_dropout = cases[8].dropout = 0.1;
  cases[9].name = "dropout in evaluation";
  cases[9].attention_dropout = cases[9].dropout = 0.5;
  cases[9].train = false;
  cases[10].name = "linear biases with dropout";
  cases[10].alibi = true;
  cases[10].attention_dropout = 0.3;
  return cases;
}

inline Plain plain_of(const Case& test, Named& parameters) {
  Plain plain{parameters};
  plain.pre = test.pre;
  plain.post = test.post;
  plain.causal = test.causal;
  plain.train = test.train;
  plain.alibi = test.alibi;
  plain.attention_dropout = test.attention_dropout;
  plain.dropout = test.dropout;
  plain.activation = test.activation;
  return plain;
}

}  // namespace smp::nn::testing
