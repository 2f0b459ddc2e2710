// SPDX-License-Identifier: Apache-2.0
// Every rule by execution: a function is captured, divided among 2 and 4 ranks and run by them, and
// its results and gradients are those of plain libtorch in one process, in float64. Operators that
// communicate show the division.

#include "nn/rewrite/rule.h"
#include "tests/nn/rewrite/rule_cases.h"

namespace smp::nn::rewrite::testing {
namespace {

/// No product of ATen's, whatever its name.
TORCH_LIBRARY(rule, library) {
  library.def("mul(Tensor x) -> Tensor", [](const Tensor& x) { return x * x; });
}

Tensor squared(const Tensor& x) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("rule::mul", "")
      .typed<Tensor(const Tensor&)>()
      .call(x);
}

/// `body` of a row-divided layer's result, a sum of the ranks' terms.
Case on_sum(std::string name, OnHidden body, std::string expected) {
  return {std::move(name),
          {{"up", {0, 1}}, {"down", {1, 1}}},
          [body](Weights& w, const Tensors& in) {
            const auto h = torch::linear(in[0] * w->scale, w->up, w->up_bias);
            return body(w, torch::linear(h, w->down));
          },
          std::move(expected)};
}

std::vector<Case> elementwise_cases() {
  return {
      on_sum(
          "LinearOnTerms", [](Weights&, Tensor x) { return x.multiply(2).div(3).neg(); },
          "copy reduce"),
      {"LinearOnPairsOfTerms",
       {{"up", {0, 1}}, {"down", {1, 1}}, {"right", {1, 1}}},
       [](Weights& w, const Tensors& in) {
         const auto h = torch::linear(in[0] * w->scale, w->up, w->up_bias);
         const auto terms = [&](const Tensor& weight) { return torch::linear(h, weight); };
         const auto mixed = torch::lerp(terms(w->down), terms(w->right), 0.3);
         return torch::rsub(mixed, terms(w->down), 1.5).subtract(terms(w->right), 0.25).divide(3);
       },
       "copy reduce"},
      on_sum(
          "NotLinear", [](Weights&, Tensor x) { return x.div(3, "floor") + x; }, "copy reduce"),
      on_sum(
          "RegisteredProduct", [](Weights&, Tensor x) { return squared(x) * 2; }, "copy reduce"),
      on_hidden(
          "Unary", 1, [](Weights&, Tensor h) { return torch::gelu(h).tanh(); }, kDivided),
      on_hidden(
          "InPlace", 1, [](Weights&, Tensor h) { return h.mul_(2).add_(1).relu_(); }, kDivided),
      on_hidden(
          "Vector", 3, [](Weights& w, Tensor h) { return h * w->row; }, kDivided),
      on_hidden(
          "Row", 1, [](Weights& w, Tensor h) { return h * w->scale; }, "copy copy gather gather"),
      on_hidden(
          "Masked", 1,
          [](Weights& w, Tensor h) {
            return torch::where(h > 0, h, w->row).masked_fill(h > 1, 0.5);
          },
          kDivided),
      {"InputWithoutGradient",
       {{"up", {0, 1}}},
       [](Weights& w, const Tensors& in) { return torch::linear(in[0], w->up) * in[2]; },
       "scatter gather gather"},
      {"WholeFactor",
       {{"up", {0, 1}}},
       [](Weights& w, const Tensors& in) {
         return torch::linear(in[0], w->up) * (in[2] * w->scale);
       },
       "scatter gather gather"},
      {"WholeSummand",
       {{"up", {0, 1}}},
       [](Weights& w, const Tensors& in) { return torch::linear(in[0], w->up) + in[2] * w->scale; },
       "gather"},
      {"TwoBranches",
       {{"up", {0, 1}}, {"other_up", {0, 1}}},
       [](Weights& w, const Tensors& in) {
         const auto x = in[0] * w->scale;
         return torch::silu(torch::linear(x, w->up)) * torch::linear(x, w->other_up);
       },
       kDivided},
      on_hidden(
          "Type", 1, [](Weights&, Tensor h) { return h.to(torch::kFloat).to(torch::kDouble); },
          kDivided),
      on_hidden(
          "TruthOfAll", 1, [](Weights&, Tensor h) { return h * (h > 1).any(); },
          "copy gather gather gather"),
      // A reshape that copied the captured tensor is a view of the joined one.
      on_hidden(
          "WrittenCopy", 1,
          [](Weights& w, Tensor h) {
            const auto x = h.transpose(0, 1).contiguous().transpose(0, 1);
            const auto copy = x.reshape({kBatch, 15, 16}).mul_(2);
            return torch::layer_norm(x, {kHidden}, w->row) + copy.view(h.sizes());
          },
          "copy gather"),
      // On four ranks, each with one head, the copies would be views.
      on_hidden(
          "WrittenCopyOfHeads", 1,
          [](Weights&, Tensor h) {
            const auto heads = by_head(h);
            return heads.contiguous().mul_(2).exp() + heads;
          },
          kDivided),
      on_hidden(
          "WrittenCopyLike", 1,
          [](Weights&, Tensor h) {
            const auto heads = by_head(h);
            const auto copy = heads.reshape_as(torch::zeros({kBatch, 4 * kLength, 12}));
            return copy.mul_(2).exp().view(heads.sizes()) + heads;
          },
          kDivided),
      on_hidden(
          "WrittenView", 1,
          [](Weights& w, Tensor h) {
            h.select(0, 0).mul_(2);
            h.slice(1, 0, 2).add_(w->row);
            return h.exp();
          },
          kDivided),
      on_hidden(
          "WrittenAcrossParts", 1,
          [](Weights&, Tensor h) {
            h.select(2, 5).zero_();
            return h.exp();
          },
          "gather"),
      // Tensors that require grad only since something was written into a part of them.
      {"FilledBySlices",
       {{"up", {0, 1}}, {"other_up", {0, 1}}, {"down", {0, 1}}},
       [](Weights& w, const Tensors& in) {
         const auto x = in[0] * w->scale;
         const auto filled = torch::zeros({kBatch, 2, kWidth}, doubles());
         filled.slice(1, 0, 1).copy_(x.slice(1, 0, 1));
         filled.select(1, 1).copy_(x.select(1, 3));
         return torch::linear(filled, w->up) * torch::linear(filled, w->other_up);
       },
       kDivided},
      {"FilledWhereDivided",
       {{"up", {0, 1}}, {"down", {0, 1}}},
       [](Weights& w, const Tensors& in) {
         const auto filled = torch::zeros_like(torch::linear(in[0], w->up).detach());
         filled.slice(1, 0, 2).copy_(torch::linear(in[0], w->up).slice(1, 2, 4));
         return torch::linear(filled, w->down);
       },
       "all_gather gather gather"},
      {"SumOfPartials",
       {{"up", {0, 1}}, {"down", {1, 1}}},
       [](Weights& w, const Tensors& in) {
         const auto h = torch::linear(in[0] * w->scale, w->up);
         return torch::linear(h, w->down) + torch::linear(h.relu(), w->down) * 2;
       },
       "copy reduce"},
  };
}

std::vector<Case> shape_cases() {
  return {
      on_hidden(
          "View", 1,
          [](Weights&, Tensor h) {
            return h.view({kBatch, -1, 4, 12});
          },
          kDivided),
      on_hidden(
          "ViewOfBlocks", 3,
          [](Weights&, Tensor h) {
            return h.view({kBatch, kLength, 3, 16}).exp();
          },
          kDivided),
      on_hidden(
          "MergedWithBatch", 1,
          [](Weights&, Tensor h) {
            return h.contiguous().view({kBatch, kLength * 4, 12}).transpose(0, 1);
          },
          kDivided),
      on_hidden(
          "ViewAcrossParts", 1,
          [](Weights&, Tensor h) {
            return h.view({kBatch, kLength, 3, 16}).exp();
          },
          "copy gather"),
      on_hidden(
          "Flattened", 1, [](Weights&, Tensor h) { return h.flatten(0, 1).exp(); }, kDivided),
      on_hidden(
          "Unflattened", 1,
          [](Weights&, Tensor h) {
            return h.unflatten(2, {4, 12});
          },
          kDivided),
      on_hidden(
          "UnflattenedInFront", 1,
          [](Weights&, Tensor h) {
            return h.unflatten(1, {5, 1}).exp();
          },
          kDivided),
      on_hidden(
          "Reshaped", 1,
          [](Weights&, Tensor h) {
            return by_head(h).transpose(1, 2).reshape({kBatch, kLength, kHidden});
          },
          kDivided),
      on_hidden(
          "Permuted", 1,
          [](Weights&, Tensor h) {
            return h.permute({2, 0, 1}).movedim(0, 1).mT();
          },
          kDivided),
      on_hidden(
          "Selected", 3, [](Weights&, Tensor h) { return heads_of(h)[1].exp(); }, kDivided),
      on_hidden(
          "Chunked", 3,
          [](Weights&, Tensor h) {
            const auto parts = h.chunk(3, -1);
            return parts[0] * parts[1] + parts[2];
          },
          kDivided),
      on_hidden(
          "Split", 3, [](Weights&, Tensor h) { return h.split(16, 2)[2].exp(); }, kDivided),
      on_hidden(
          "SplitWithSizes", 3,
          [](Weights&, Tensor h) {
            return h.split_with_sizes({32, 16}, 2)[0].exp();
          },
          kDivided),
      on_hidden(
          "ChunkedAcrossBlocks", 1, [](Weights&, Tensor h) { return h.chunk(3, -1)[0].exp(); },
          kJoined),
      on_hidden(
          "Sliced", 3, [](Weights&, Tensor h) { return h.slice(2, 16, 48).exp(); }, kDivided),
      on_hidden(
          "Narrowed", 3,
          [](Weights&, Tensor h) { return h.narrow(2, 32, 16).narrow(1, 1, 2).exp(); }, kDivided),
      on_hidden(
          "Unbound", 1, [](Weights&, Tensor h) { return h.unbind(1)[2].exp(); }, kDivided),
      on_hidden(
          "UnboundToNothing", 1,
          [](Weights&, Tensor h) {
            EXPECT_TRUE(h.slice(1, 0, 0).unbind(1).empty());
            return h.exp();
          },
          "copy gather gather gather"),
      on_hidden(
          "Glu", 2, [](Weights&, Tensor h) { return torch::glu(h, -1); }, kDivided),
      on_hidden(
          "Joined", 2,
          [](Weights&, Tensor h) {
            const auto parts = h.chunk(2, -1);
            return torch::cat({-parts[1], parts[0], parts[1]}, -1);
          },
          kDivided),
      on_hidden(
          "JoinedRows", 1,
          [](Weights&, Tensor h) {
            return torch::cat({h, h.exp()}, 1);
          },
          kDivided),
      on_hidden(
          "Stacked", 1,
          [](Weights&, Tensor h) {
            return torch::stack({h, h.exp()}, 1);
          },
          kDivided),
      on_hidden(
          "JoinedParameters", 1,
          [](Weights& w, Tensor h) {
            return h * torch::cat({w->up, w->left}, 1).sum(1) *
                   torch::stack({w->other_up, w->up}, 0).sum(at::IntArrayRef({0, 2}));
          },
          kDivided),
      on_hidden(
          "Expanded", 1,
          [](Weights&, Tensor h) {
            return h.unsqueeze(1).expand({-1, 2, -1, -1}).exp();
          },
          kDivided),
      on_hidden(
          "Like", 1,
          [](Weights&, Tensor h) {
            const auto heads = h.exp().view({kBatch, kLength, 4, 12});
            return heads.view_as(h) * heads.transpose(2, 3).reshape_as(h);
          },
          "copy gather scatter gather gather"),
      // Heads of samples cannot be cut into positions: joined, in the sizes of the whole.
      on_hidden(
          "LikeOtherParts", 1,
          [](Weights&, Tensor h) {
            const auto heads = h.view({kBatch, kLength, 4, 12});
            return heads.transpose(1, 2).exp().reshape_as(heads) * heads;
          },
          "copy gather scatter gather gather"),
      on_hidden(
          "Repeated", 1,
          [](Weights&, Tensor h) {
            return h.repeat({2, 1, 1, 1});
          },
          kDivided),
      on_hidden(
          "Squeezed", 1,
          [](Weights&, Tensor h) { return h.unsqueeze(0).squeeze(0).unsqueeze(-1).squeeze(); },
          kDivided),
  };
}

std::vector<Case> reduction_cases() {
  return {
      on_hidden(
          "Softmax", 1, [](Weights&, Tensor h) { return by_head(h).softmax(-1); }, kDivided),
      on_hidden(
          "SoftmaxAcrossParts", 1, [](Weights&, Tensor h) { return h.softmax(-1); }, kJoined),
      on_hidden(
          "Sum", 1,
          [](Weights&, Tensor h) {
            return h.sum(1) + h.sum(at::IntArrayRef({0, 1}), true)[0];
          },
          kDivided),
      on_hidden(
          "SumOfParts", 1, [](Weights&, Tensor h) { return h.sum(-1); }, "copy reduce"),
      on_hidden(
          "SumOfAll", 1, [](Weights&, Tensor h) { return h.exp().sum(); }, "copy reduce"),
      on_hidden(
          "MeanOfParts", 1, [](Weights&, Tensor h) { return h.mean(-1, true); }, "copy reduce"),
      on_hidden(
          "Mean", 1, [](Weights&, Tensor h) { return h.mean(1); }, kDivided),
      on_hidden(
          "Max", 1, [](Weights&, Tensor h) { return std::get<0>(h.max(1)); }, kDivided),
      on_hidden(
          "NormOfHeads", 1,
          [](Weights& w, Tensor h) {
            return torch::layer_norm(h.view({kBatch, kLength, 12, 4}), {4}, w->of_head, w->of_head);
          },
          "copy copy gather gather"),
      on_hidden(
          "NormAcrossParts", 1,
          [](Weights& w, Tensor h) { return torch::layer_norm(h, {kHidden}, w->row, w->row); },
          kJoined),
      on_hidden(
          "Triangle", 1, [](Weights&, Tensor h) { return by_head(h).tril(); }, kDivided),
      {"GroupNorm",
       {{"kernel", {0, 1}}},
       [](Weights& w, const Tensors& in) {
         const auto x = torch::conv1d(in[3] * w->scale, w->kernel, w->kernel_bias);
         return torch::group_norm(x, 4, w->channels, w->channels).relu();
       },
       kDivided},
  };
}

std::vector<Case> special_cases() {
  const auto logits = [](Weights& w, const Tensors& in) {
    return torch::linear(in[0].mul(w->scale).flatten(0, 1), w->table);
  };
  namespace F = torch::nn::functional;
  const std::map<std::string, std::pair<int, int>> vocabulary = {{"table", {0, 1}}};
  return {
      on_hidden(
          "Dropout", 3, [](Weights&, Tensor h) { return torch::dropout(h, 0.4, true); },
          "copy dropout gather gather"),
      on_hidden(
          "DropoutInPlace", 1,
          [](Weights&, Tensor h) { return torch::dropout_(h, 0.4, true).exp(); },
          "copy dropout gather gather"),
      // Masks are drawn in the order of memory, which joining has changed.
      on_hidden(
          "DropoutInAnotherOrder", 1,
          [](Weights&, Tensor h) { return torch::dropout(h.transpose(1, 2).exp(), 0.4, true); },
          "copy gather"),
      on_hidden(
          "DropoutInPlaceInAnotherOrder", 1,
          [](Weights&, Tensor h) {
            auto x = h.transpose(1, 2).sin();
            return torch::dropout_(x, 0.4, true);
          },
          "copy gather"),
      {"CrossEntropy", vocabulary,
       [=](Weights& w, const Tensors& in) {
         return F::cross_entropy(logits(w, in), in[1].flatten());
       },
       "copy cross_entropy"},
      {"CrossEntropyWithOptions", vocabulary,
       [=](Weights& w, const Tensors& in) {
         const auto weight = torch::linspace(0.5, 2, 16, doubles());
         return F::cross_entropy(logits(w, in), in[1].flatten(),
                                 F::CrossEntropyFuncOptions()
                                     .weight(weight)
                                     .ignore_index(3)
                                     .reduction(torch::kSum)
                                     .label_smoothing(0.1));
       },
       "copy cross_entropy"},
      {"CrossEntropyOfImages", vocabulary,
       [=](Weights& w, const Tensors& in) {
         const auto x = torch::linear(in[0] * w->scale, w->table).transpose(1, 2);
         return F::cross_entropy(x, in[1]);
       },
       "copy cross_entropy"},
      {"LikelihoodOfLogSoftmax", vocabulary,
       [=](Weights& w, const Tensors& in) {
         return F::nll_loss(torch::log_softmax(logits(w, in), 1), in[1].flatten());
       },
       "copy cross_entropy"},
      {"LikelihoodOfWrittenLogits", vocabulary,
       [=](Weights& w, const Tensors& in) {
         const auto x = logits(w, in);
         const auto scores = torch::log_softmax(x.detach(), 1);
         x.mul_(2);
         const auto loss = F::nll_loss(scores, in[1].flatten());
         return loss + x.exp().mean();
       },
       "copy cross_entropy reduce"},
      {"LikelihoodOfAnotherSoftmax", vocabulary,
       [=](Weights& w, const Tensors& in) {
         return F::nll_loss(torch::log_softmax(logits(w, in), 0), in[1].flatten());
       },
       "copy gather"},
      {"LikelihoodOfOtherTypes", vocabulary,
       [=](Weights& w, const Tensors& in) {
         const auto target = in[1].flatten().to(torch::kByte);
         const auto x = logits(w, in);
         return F::nll_loss(torch::log_softmax(x, 1), target) +
                F::nll_loss(torch::log_softmax(x, 1, torch::kFloat), in[1].flatten());
       },
       "copy gather"},
      {"LogSoftmaxForOthers", vocabulary,
       [=](Weights& w, const Tensors& in) {
         const auto x = torch::log_softmax(logits(w, in), 1);
         return F::nll_loss(x, in[1].flatten()) + x.mean();
       },
       "copy gather"},
      {"TiedVocabulary", vocabulary,
       [=](Weights& w, const Tensors& in) {
         const auto x = torch::embedding(w->table, in[1]) * w->scale;
         return F::cross_entropy(torch::linear(x, w->table).flatten(0, 1), in[1].flatten());
       },
       "embedding reduce copy cross_entropy"},
  };
}

class RuleTest : public ::testing::TestWithParam<Case> {};

TEST_P(RuleTest, EqualsOneProcess) {
  register_rule("rule::mul", elementwise);
  Weights weights;
  const TensorTable table = table_of(*weights);
  const Body& body = GetParam().body;
  const Function step = training([&](const Tensors& in) -> Tensors {
    const auto result = body(weights, in);
    return {result.square().norm().sqrt(), result};
  });
  const auto whole = capture(table, inputs(), step);
  for (int ranks : {2, 4}) {
    DivideOptions options = eager_options(table, ranks);
    options.latency_us = 1e9;  // only the fixed ones are divided, and their results
    for (const auto& [name, how] : GetParam().fixed) {
      options.fixed[name] = {table.at(name).tensor.sizes().vec(), how.first, how.second, ranks};
    }
    const DividedGraph divided = divide(*whole, options);
    if (ranks == 2) {
      EXPECT_EQ(collectives(divided.graph), GetParam().expected) << divided.graph.to_string();
    }
    expect_equals_plain(divided, *weights, table, inputs(), step, ranks);
    expect_metas_hold(divided, table, inputs(), ranks);
  }
}

std::string name_of(const ::testing::TestParamInfo<Case>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Elementwise, RuleTest, ::testing::ValuesIn(elementwise_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Shapes, RuleTest, ::testing::ValuesIn(shape_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Reductions, RuleTest, ::testing::ValuesIn(reduction_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Products, RuleTest, ::testing::ValuesIn(product_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Special, RuleTest, ::testing::ValuesIn(special_cases()), name_of);

}  // namespace
}  // namespace smp::nn::rewrite::testing
