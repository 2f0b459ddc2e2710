// SPDX-License-Identifier: Apache-2.0
// Which operators treat the samples apart, operator by operator.

#include <algorithm>
#include <ostream>

#include "tests/graph/coalesced.h"

namespace smp::graph::testing {
namespace {

struct Case {
  std::string name;
  std::string op;  ///< operator of which all calls run once, or for each microbatch
  std::vector<std::vector<int64_t>> shapes;  ///< shapes of all samples
  Body body;
  std::vector<int64_t> axes;  ///< empty: 0
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

/// The inputs for so many samples in a microbatch.
Tensors inputs_of(const Case& c, int64_t samples) {
  torch::manual_seed(9);
  Tensors inputs;
  for (auto shape : c.shapes) {
    std::replace(shape.begin(), shape.end(), kAll, kFactor * samples);
    inputs.push_back(torch::randn(shape, doubles()));
  }
  return inputs;
}

/// Operators that treat the samples apart.
std::vector<Case> independent() {
  const auto scaled = [](Weights& w, const Tensors& in) { return in[0] * w->scale; };
  const auto on = [=](auto body) {
    return Body([=](Weights& w, const Tensors& in) { return body(w, scaled(w, in)); });
  };
  using T = torch::Tensor;
  const std::vector<int64_t> matrix = {kAll, 4}, cube = {kAll, 5, 4}, picture = {kAll, 3, 8, 8};
  return {
      {"Broadcast", "aten::add", {matrix}, on([](Weights& w, T x) { return x + w->row; }), {}},
      {"TwoInputs",
       "aten::mul",
       {matrix, {kAll, 1}},
       [](Weights& w, const Tensors& in) { return in[0] * in[1] * w->row; },
       {}},
      {"ClipBetweenBatchedBounds",
       "aten::clip",
       {matrix},
       on([](Weights& w, T x) { return torch::clip(w->row, x, x + 1); }),
       {}},
      {"ClampByOneBatchedBound",
       "aten::clamp",
       {cube},
       on([](Weights& w, T x) { return torch::clamp(w->row, x); }),
       {}},
      {"InPlace", "aten::relu_", {matrix}, on([](Weights&, T x) { return x.relu_(); }), {}},
      {"Where",
       "aten::where",
       {matrix},
       on([](Weights& w, T x) { return torch::where(x > 0, x, w->row); }),
       {}},
      {"Linear",
       "aten::linear",
       {cube},
       on([](Weights& w, T x) { return torch::linear(x, w->square, w->row); }),
       {}},
      {"LinearSecondAxis",
       "aten::linear",
       {{5, kAll, 4}},
       on([](Weights& w, T x) { return torch::linear(x, w->square); }),
       {1}},
      {"Addmm",
       "aten::addmm",
       {matrix},
       on([](Weights& w, T x) { return torch::addmm(w->row, x, w->square); }),
       {}},
      {"MatmulRows",
       "aten::matmul",
       {cube},
       on([](Weights& w, T x) { return x.matmul(w->square); }),
       {}},
      {"MatmulVector",
       "aten::matmul",
       {cube},
       on([](Weights& w, T x) { return x.matmul(w->row); }),
       {}},
      {"MatmulColumns",
       "aten::matmul",
       {{4, kAll}},
       on([](Weights& w, T x) { return w->square.matmul(x); }),
       {1}},
      {"MatmulOfSamples",
       "aten::matmul",
       {cube},
       on([](Weights&, T x) { return x.matmul(x.transpose(1, 2)); }),
       {}},
      {"Bmm", "aten::bmm", {cube}, on([](Weights&, T x) { return x.bmm(x.transpose(1, 2)); }), {}},
      {"Softmax",
       "aten::softmax",
       {cube},
       on([](Weights&, T x) { return x.softmax(-1) + x.softmax(1); }),
       {}},
      {"LayerNorm",
       "aten::layer_norm",
       {cube},
       on([](Weights& w, T x) { return torch::layer_norm(x, {4}, w->row, w->row); }),
       {}},
      {"GroupNorm",
       "aten::group_norm",
       {{kAll, 4, 5}},
       on([](Weights& w, T x) { return torch::group_norm(x, 2, w->row, w->row); }),
       {}},
      {"BatchNormOfAverages",
       "aten::batch_norm",
       {{kAll, 4, 5}},
       on([](Weights& w, T x) {
         return torch::batch_norm(x, w->row, w->row, w->mean, w->variance, false, 0.1, 1e-5, false);
       }),
       {}},
      {"Sums",
       "aten::sum",
       {cube},
       on([](Weights&, T x) { return x.sum(1) + x.sum({-1}, true).squeeze(-1).sum(1, true); }),
       {}},
      {"Mean",
       "aten::mean",
       {cube},
       on([](Weights&, T x) {
         return x.mean({1, 2});
       }),
       {}},
      {"Max", "aten::max", {cube}, on([](Weights&, T x) { return std::get<0>(x.max(1)); }), {}},
      {"Sort",
       "aten::sort",
       {matrix},
       on([](Weights&, T x) { return std::get<0>(x.sort(1)); }),
       {}},
      {"Cumsum", "aten::cumsum", {cube}, on([](Weights&, T x) { return x.cumsum(1); }), {}},
      {"Merged",
       "aten::view",
       {cube},
       on([](Weights&, T x) {
         return x.contiguous().view({-1, 4}).exp();
       }),
       {}},
      {"MergedSecondAxis",
       "aten::reshape",
       {{5, kAll, 2, 2}},
       on([](Weights&, T x) {
         return x.reshape({5, -1, 2});
       }),
       {1}},
      {"Heads",
       "aten::permute",
       {cube},
       on([](Weights&, T x) {
         return x.reshape({x.size(0), 5, 2, 2}).permute({2, 0, 1, 3}).select(0, 1).exp();
       }),
       {}},
      {"Attention",
       "aten::scaled_dot_product_attention",
       {{kAll, 2, 5, 4}},
       on([](Weights&, T x) {
         return torch::scaled_dot_product_attention(x, x + 1, x.exp(), {}, 0.0, true);
       }),
       {}},
      {"MaskedAttention",
       "aten::scaled_dot_product_attention",
       {{kAll, 2, 5, 4}},
       on([](Weights& w, T x) {
         return torch::scaled_dot_product_attention(x, x, x,
                                                    w->square.new_ones({5, 5}).tril().log());
       }),
       {}},
      {"Embedding",
       "aten::embedding",
       {cube},
       on([](Weights& w, T x) {
         return torch::embedding(w->table, x.detach().abs().ceil().clamp(0, 6).to(torch::kLong));
       }),
       {}},
      {"Positions",
       "aten::expand",
       {cube},
       on([](Weights& w, T x) {
         const auto places = torch::arange(5).unsqueeze(0).expand({x.size(0), 5});
         return x + torch::embedding(w->table, places);
       }),
       {}},
      {"Factory",
       "aten::zeros",
       {matrix},
       on([](Weights& w, T x) {
         return torch::cat({x, torch::zeros({x.size(0), 4}, doubles()) + w->row}, 1);
       }),
       {}},
      {"Conv1d",
       "aten::conv1d",
       {{kAll, 4, 9}},
       on([](Weights& w, T x) { return torch::conv1d(x, w->kernel); }),
       {}},
      {"Conv2d",
       "aten::conv2d",
       {picture},
       on([](Weights& w, T x) { return torch::conv2d(x, w->image_kernel, {}, 1, 1); }),
       {}},
      {"MaxPool",
       "aten::max_pool2d",
       {picture},
       on([](Weights&, T x) { return torch::max_pool2d(x, 2); }),
       {}},
      {"AveragePool",
       "aten::adaptive_avg_pool2d",
       {picture},
       on([](Weights&, T x) {
         return torch::adaptive_avg_pool2d(x, {2, 2}).flatten(1);
       }),
       {}},
      {"Pad",
       "aten::constant_pad_nd",
       {picture},
       on([](Weights&, T x) {
         return torch::constant_pad_nd(x, {1, 1, 2, 0});
       }),
       {}},
      {"Pieces",
       "aten::chunk",
       {cube},
       on([](Weights&, T x) {
         const auto pieces = x.chunk(2, 2);
         return torch::stack({pieces[0], pieces[1] * 2}, 0);
       }),
       {}},
      {"Repeated",
       "aten::repeat",
       {matrix},
       on([](Weights& w, T x) {
         return x.repeat({1, 2}) + w->row.repeat({x.size(0), 2});
       }),
       {}},
      {"Recurrent",
       "aten::rnn_tanh",
       {{5, kAll, 4}},
       on([](Weights& w, T x) {
         return std::get<0>(torch::rnn_tanh(x, x.narrow(0, 0, 1), {w->square, w->square}, false, 1,
                                            0.0, false, false, false));
       }),
       {1}},
      {"RecurrentBatchFirst",
       "aten::rnn_tanh",
       {cube},
       on([](Weights& w, T x) {
         const auto state = x.sum(1).unsqueeze(0);
         return std::get<0>(
             torch::rnn_tanh(x, state, {w->square, w->square}, false, 1, 0.0, false, false, true));
       }),
       {}},
      {"ConvolutionInGroups",
       "aten::conv1d",
       {{kAll, 3, 9}},
       on([](Weights& w, T x) {
         return torch::conv1d(x, w->kernel.narrow(1, 0, 1), {}, 1, int64_t{0}, 1, 3);
       }),
       {}},
      {"TransposedConvolution",
       "aten::conv_transpose1d",
       {{kAll, 3, 5}},
       on([](Weights& w, T x) { return torch::conv_transpose1d(x, w->kernel); }),
       {}},
      {"Upsampling",
       "aten::upsample_nearest2d",
       {picture},
       on([](Weights&, T x) {
         return torch::upsample_nearest2d(x, {16, 16});
       }),
       {}},
      {"PixelShuffle",
       "aten::pixel_shuffle",
       {{kAll, 4, 3, 3}},
       on([](Weights&, T x) { return torch::pixel_shuffle(x, 2); }),
       {}},
      {"Prelu",
       "aten::prelu",
       {{kAll, 4, 5}},
       on([](Weights& w, T x) { return torch::prelu(x, w->row); }),
       {}},
      {"Windows",
       "aten::unfold",
       {matrix},
       on([](Weights&, T x) { return x.unfold(1, 2, 1); }),
       {}},
      {"Flipped", "aten::flip", {matrix}, on([](Weights&, T x) { return x.flip({1}); }), {}},
      {"Rolled", "aten::roll", {matrix}, on([](Weights&, T x) { return x.roll({1}, {1}); }), {}},
      {"Gathered",
       "aten::gather",
       {matrix},
       on([](Weights&, T x) { return x.gather(1, std::get<1>(x.sort(1))) * 2; }),
       {}},
      {"Selected",
       "aten::index_select",
       {matrix},
       on([](Weights&, T x) { return x.index_select(1, torch::arange(3)); }),
       {}},
      {"Patches",
       "aten::im2col",
       {picture},
       on([](Weights&, T x) {
         return torch::im2col(x, {2, 2}, {1, 1}, {0, 0}, {1, 1});
       }),
       {}},
      {"Reflected",
       "aten::reflection_pad1d",
       {cube},
       on([](Weights&, T x) {
         return torch::reflection_pad1d(x, {1, 1});
       }),
       {}},
      {"RepeatedRow",
       "aten::repeat",
       {matrix},
       on([](Weights& w, T x) {
         return x + w->row.unsqueeze(0).repeat({x.size(0), 1});
       }),
       {}},
      {"DimensionsMoved",
       "aten::movedim",
       {{kAll, 5, 4, 3}},
       on([](Weights&, T x) {
         return x.movedim({0, -1}, {2, 0}).cumsum(1) +
                x.movedim({1, 2}, {-1, 1}).permute({2, 3, 0, 1});
       }),
       {}},
      {"TransposedInPlace",
       "aten::transpose_",
       {cube},
       on([](Weights&, T x) { return x.transpose_(0, 2).cumsum(1); }),
       {}},
      {"MatrixTransposedInPlace",
       "aten::t_",
       {matrix},
       on([](Weights&, T x) { return x.t_().cumsum(0); }),
       {}},
      {"UnsqueezedInPlace",
       "aten::unsqueeze_",
       {matrix},
       on([](Weights&, T x) { return x.unsqueeze_(0).cumsum(2); }),
       {}},
      {"SqueezedInPlace",
       "aten::squeeze_",
       {{kAll, 1, 4}},
       on([](Weights&, T x) { return x.squeeze_(1).cumsum(1); }),
       {}},
      {"NoDimensionSqueezed",
       "aten::squeeze",
       {{kAll, 1, 4}},
       on([](Weights&, T x) { return x.squeeze(at::IntArrayRef()).cumsum(2); }),
       {}},
      {"Retyped",
       "aten::view",
       {matrix},
       on([](Weights&, T x) {
         return x * x.detach().view(torch::kInt).to(torch::kDouble).sin().narrow(1, 0, 4);
       }),
       {}},
      {"NumberOfTheBatch",
       "aten::div",
       {matrix},
       on([](Weights&, T x) { return x / static_cast<double>(x.size(0)); }),
       {}},
  };
}

/// Operators that do not, or that nothing is known of.
std::vector<Case> dependent() {
  const auto on = [](auto body) {
    return Body(
        [=](Weights& w, const Tensors& in) { return body(w, torch::tanh(in[0] * w->scale)); });
  };
  using T = torch::Tensor;
  const std::vector<int64_t> matrix = {kAll, 4}, cube = {kAll, 5, 4};
  return {
      {"SoftmaxOverBatch",
       "aten::softmax",
       {matrix},
       on([](Weights&, T x) { return x.softmax(0); }),
       {}},
      {"SumOverBatch", "aten::sum", {matrix}, on([](Weights&, T x) { return x.sum(0); }), {}},
      {"SumOfAll", "aten::sum", {matrix}, on([](Weights&, T x) { return x * x.sum(); }), {}},
      {"Centered",
       "aten::mean",
       {matrix},
       on([](Weights&, T x) { return x - x.mean(0) * 0.5; }),
       {}},
      {"CumsumOverBatch",
       "aten::cumsum",
       {matrix},
       on([](Weights&, T x) { return x.cumsum(0); }),
       {}},
      {"Flip", "aten::flip", {matrix}, on([](Weights&, T x) { return x.flip({0}); }), {}},
      {"RollOfAll", "aten::roll", {matrix}, on([](Weights&, T x) { return x.roll(1); }), {}},
      {"SortOverBatch",
       "aten::sort",
       {matrix},
       on([](Weights&, T x) { return std::get<0>(x.sort(0)); }),
       {}},
      {"Gram", "aten::matmul", {matrix}, on([](Weights&, T x) { return x.matmul(x.t()); }), {}},
      {"Covariance",
       "aten::matmul",
       {matrix},
       on([](Weights&, T x) { return x.t().matmul(x); }),
       {}},
      {"Numbered",
       "aten::add",
       {matrix},
       on([](Weights&, T x) { return x + torch::arange(x.size(0), doubles()).unsqueeze(1); }),
       {}},
      {"Folded",
       "aten::reshape",
       {{5, kAll, 4}},
       on([](Weights&, T x) {
         return x.reshape({-1, 4}).cumsum(1);
       }),
       {1}},
      {"Permuted",
       "aten::index_select",
       {matrix},
       on([](Weights&, T x) {
         return x.index_select(0, torch::tensor({0, 0}));
       }),
       {}},
      {"JoinedAlongBatch",
       "aten::cat",
       {matrix},
       on([](Weights&, T x) {
         return torch::cat({x, x * 2}, 0);
       }),
       {}},
      {"Tiled",
       "aten::repeat",
       {matrix},
       on([](Weights&, T x) {
         return x.repeat({2, 1});
       }),
       {}},
      {"AttentionAcrossBatch",
       "aten::scaled_dot_product_attention",
       {{2, kAll, 4}},
       on([](Weights&, T x) { return torch::scaled_dot_product_attention(x, x, x); }),
       {1}},
      {"LayerNormOverBatch",
       "aten::layer_norm",
       {{kAll, 4}},
       on([](Weights&, T x) {
         return torch::layer_norm(x, {x.size(0), 4});
       }),
       {}},
      {"BatchNormOfBatch",
       "aten::batch_norm",
       {matrix},
       on([](Weights& w, T x) {
         return torch::batch_norm(x, w->row, w->row, {}, {}, true, 0.1, 1e-5, false);
       }),
       {}},
      {"CountedRows",
       "aten::embedding",
       {cube},
       on([](Weights& w, T x) {
         const auto rows = x.detach().abs().ceil().clamp(0, 6).to(torch::kLong);
         return torch::embedding(w->table, rows, -1, /*scale_grad_by_freq=*/true);
       }),
       {}},
      {"Unknown",
       "aten::cdist",
       {matrix},
       on([](Weights& w, T x) { return torch::cdist(x, w->square); }),
       {}},
      {"WrittenInParts",
       "aten::copy_",
       {matrix},
       on([](Weights&, T x) {
         auto whole = torch::zeros({4}, doubles());
         whole.select(0, 0).copy_(x.sum());
         return whole + x;
       }),
       {}},
  };
}

class Rules : public ::testing::TestWithParam<Case> {
 protected:
  /// `once`: whether the operators of the case run once for all microbatches.
  static void check(bool once, int64_t samples) {
    SCOPED_TRACE(samples);
    const Case& c = GetParam();
    const Tensors inputs = inputs_of(c, samples);
    const auto axes = c.axes.empty() ? first_axes(inputs) : c.axes;
    const Body body = training(c.body);
    Captured captured = capture(body, inputs, axes);
    const auto [whole, part] = counts(captured, c.op);
    EXPECT_GT(once ? whole : part, 0) << captured.one->to_string();
    EXPECT_EQ(once ? part : whole, 0) << captured.one->to_string();
    EXPECT_EQ(counts(captured, "aten::norm").first, 0) << "the loss";
    expect_equals_microbatches(body, inputs, axes, captured);
  }
};

class Independent : public Rules {};
class Dependent : public Rules {};

TEST_P(Independent, RunsOnceAndEqualsMicrobatches) {
  for (int64_t samples : {kSamples, int64_t{1}}) check(true, samples);
}

TEST_P(Dependent, RunsForEachMicrobatch) {
  for (int64_t samples : {kSamples, int64_t{1}}) check(false, samples);
}

/// Microbatches that shared a mask of dropout would not be independent.
TEST(Rules, AttentionDropsOnceForQueriesOfTheSamplesOnly) {
  for (const bool shared : {true, false}) {
    const Body body = [=](Weights& w, const Tensors& in) {
      const auto values = in[0] * w->scale;
      const auto queries = shared ? w->square.unsqueeze(0) : values;
      return torch::scaled_dot_product_attention(queries, w->square.unsqueeze(0), values, {}, 0.5);
    };
    const Tensors inputs = {torch::randn({kAll, 4, 4}, doubles())};
    const Captured captured = capture(training(body), inputs, {0});
    const auto [whole, part] = counts(captured, "aten::scaled_dot_product_attention");
    EXPECT_EQ(whole, shared ? 0 : 1) << captured.one->to_string();
    EXPECT_EQ(part, shared ? 1 : 0) << captured.one->to_string();
  }
}

/// libtorch's gradient of two bounds needs shapes that fit microbatches of one sample, not several.
TEST(Rules, ClampsAtOnceWhereItsGradientsFit) {
  const Body shared = training([](Weights& w, const Tensors& in) {
    const auto row = w->row.unsqueeze(0);
    return torch::clip(row, in[0] * w->scale, row + 1) + in[0] * w->scale;
  });
  const Body batched = training([](Weights& w, const Tensors& in) {
    const auto bound = in[0] * w->scale;
    return torch::clip(w->row.unsqueeze(0), bound, bound + 1);
  });
  for (const bool once : {false, true}) {
    const Tensors inputs = {torch::randn({kFactor, 4}, doubles())};
    const Body& body = once ? batched : shared;
    Captured captured = capture(body, inputs, {0});
    EXPECT_EQ(counts(captured, "aten::clip"), once ? std::pair(1, 0) : std::pair(0, 1));
    expect_equals_microbatches(body, inputs, {0}, captured);
  }
}

const auto name_of = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Rules, Independent, ::testing::ValuesIn(independent()), name_of);
INSTANTIATE_TEST_SUITE_P(Rules, Dependent, ::testing::ValuesIn(dependent()), name_of);

}  // namespace
}  // namespace smp::graph::testing
