// Several microbatches as one: what a coalesced graph computes, and the gradients it gives, against
// plain eager code that runs one microbatch after the other, in float64.

#include "graph/coalesce.h"

#include "tests/graph/harness.h"

namespace smp::graph::testing {
namespace {

constexpr int kFactor = 3;
constexpr int64_t kSamples = 2;  // of a microbatch
constexpr double kTolerance = 1e-12;

torch::TensorOptions doubles() { return torch::kDouble; }

/// Parameters to mix with the samples, so that every rule has a gradient to get right.
struct WeightsImpl : torch::nn::Module {
  WeightsImpl() {
    torch::manual_seed(3);
    scale = register_parameter("scale", torch::rand({1}, doubles()) + 0.5);
    row = register_parameter("row", torch::randn({4}, doubles()));
    square = register_parameter("square", torch::randn({4, 4}, doubles()));
    table = register_parameter("table", torch::randn({7, 4}, doubles()));
    kernel = register_parameter("kernel", torch::randn({3, 4, 3}, doubles()));
    image_kernel = register_parameter("image_kernel", torch::randn({2, 3, 3, 3}, doubles()));
    mean = register_buffer("mean", torch::randn({4}, doubles()));
    variance = register_buffer("variance", torch::rand({4}, doubles()) + 0.5);
  }
  torch::Tensor scale, row, square, table, kernel, image_kernel, mean, variance;
};
TORCH_MODULE(Weights);

using Body = std::function<torch::Tensor(Weights&, const Tensors&)>;

struct Captured {
  Weights weights;
  TensorTable table = table_of(*weights);
  std::unique_ptr<Graph> one, many;
  BatchAxes axes;
};

Tensors slice(const Tensors& inputs, int part, const std::vector<int64_t>& axes) {
  Tensors result;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const int64_t size = inputs[i].size(axes[i]) / kFactor;
    result.push_back(inputs[i].narrow(axes[i], part * size, size).clone());
  }
  return result;
}

/// Captures the step on one microbatch and on all, and finds out what may be coalesced.
Captured capture(const Body& body, const Tensors& inputs, const std::vector<int64_t>& axes) {
  Captured result;
  const Function step = [&](const Tensors& tensors) {
    return Tensors{body(result.weights, tensors)};
  };
  result.one = trace(result.table, slice(inputs, 0, axes), step, false).recorded;
  result.many = trace(result.table, inputs, step, false).recorded;
  result.axes = find_batch_axes(*result.one, *result.many, kFactor);
  return result;
}

/// How many operators of that name run once, and how many for each microbatch.
std::pair<int, int> counts(const Captured& captured, const std::string& name) {
  int whole = 0, part = 0;
  for (size_t i = 0; i < captured.axes.role.size(); ++i) {
    if (captured.one->operators[i].handle.operator_name().name != name) continue;
    (captured.axes.role[i] == BatchRole::kPart ? part : whole) += 1;
  }
  return {whole, part};
}

std::vector<int64_t> first_axes(const Tensors& inputs) {
  return std::vector<int64_t>(inputs.size(), 0);
}

/// The step that trains on what `body` makes: the loss of a microbatch is no sum over samples.
Body training(const Body& body) {
  return [body](Weights& weights, const Tensors& inputs) {
    const auto result = body(weights, inputs);
    testing::backward(result.square().norm().sqrt());
    return result;
  };
}

/// Compares the coalesced graph with the microbatches one by one: results, and the sums of the
/// gradients.
void expect_equals_microbatches(const Body& body, const Tensors& inputs,
                                const std::vector<int64_t>& axes, Captured& captured) {
  ASSERT_EQ(captured.axes.refusal, "");
  const Coalesced coalesced = coalesce(*captured.one, *captured.many, captured.axes, kFactor);
  const Replayed got = replay(coalesced.graph, captured.table, inputs);
  captured.weights->zero_grad();
  ASSERT_EQ(got.outputs.size(), size_t{kFactor});
  for (int part = 0; part < kFactor; ++part) {
    const auto expected = body(captured.weights, slice(inputs, part, axes));
    EXPECT_EQ(got.outputs[part].sizes(), expected.sizes());
    EXPECT_TRUE(torch::allclose(got.outputs[part], expected, kTolerance, kTolerance))
        << "microbatch " << part << "\n"
        << coalesced.graph.to_string();
  }
  for (const auto& item : captured.weights->named_parameters()) {
    const auto expected = item.value().grad();
    const auto gradient =
        got.gradients.count(item.key()) > 0 ? got.gradients.at(item.key()) : torch::Tensor();
    ASSERT_EQ(gradient.defined(), expected.defined()) << item.key();
    if (!expected.defined()) continue;
    EXPECT_TRUE(torch::allclose(gradient, expected, kTolerance, kTolerance))
        << "gradient of " << item.key() << "\n"
        << coalesced.graph.to_string();
  }
}

struct Case {
  std::string name;
  std::string op;  ///< of which all calls run once, or for each microbatch
  std::vector<std::vector<int64_t>> shapes;  ///< of all samples
  Body body;
  std::vector<int64_t> axes;  ///< empty: 0
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

constexpr int64_t kAll = kFactor * kSamples;

/// With so many samples in a microbatch.
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

const auto name_of = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Rules, Independent, ::testing::ValuesIn(independent()), name_of);
INSTANTIATE_TEST_SUITE_P(Rules, Dependent, ::testing::ValuesIn(dependent()), name_of);

/// A chain of the cases that keep [samples, 5, 4], to mix the rules.
TEST(Coalesce, SamplesMayBePermuted) {
  const Body body = [](Weights& w, const Tensors& in) {
    auto x = torch::linear(in[0], w->square, w->row);
    x = x + torch::scaled_dot_product_attention(x, x, x);
    return torch::layer_norm(x, {4}).softmax(1);
  };
  const Tensors inputs = {torch::randn({kAll, 5, 4}, doubles())};
  Captured captured = capture(body, inputs, {0});
  ASSERT_EQ(captured.axes.refusal, "");
  const Coalesced coalesced = coalesce(*captured.one, *captured.many, captured.axes, kFactor);
  const auto order = torch::tensor({3, 1, 5, 0, 2, 4});
  const auto straight = torch::cat(replay(coalesced.graph, captured.table, inputs).outputs);
  const auto mixed = torch::cat(
      replay(coalesced.graph, captured.table, {inputs[0].index_select(0, order)}).outputs);
  EXPECT_TRUE(torch::allclose(mixed, straight.index_select(0, order), kTolerance, kTolerance));
}

TEST(Coalesce, CutsOnceWhereMicrobatchesPart) {
  const Body body = training([](Weights& w, const Tensors& in) {
    return torch::cross_entropy_loss(torch::linear(in[0], w->square),
                                     in[1].select(1, 0).to(torch::kLong));
  });
  const Tensors inputs = {torch::randn({kAll, 4}, doubles()), torch::zeros({kAll, 1}, doubles())};
  Captured captured = capture(body, inputs, {0, 0});
  const Coalesced coalesced = coalesce(*captured.one, *captured.many, captured.axes, kFactor);
  std::map<std::string, int> calls;
  for (const Operator& op : coalesced.graph.operators) ++calls[op.name()];
  EXPECT_EQ(calls["aten::linear"], 1);
  EXPECT_EQ(calls["aten::to.dtype"], 1);
  EXPECT_EQ(calls["aten::split.Tensor"], 2);
  EXPECT_EQ(calls["aten::cross_entropy_loss"], kFactor);
  EXPECT_EQ(coalesced.graph.roots.size(), size_t{kFactor});
  EXPECT_EQ(coalesced.run_once(), 3u);
  expect_equals_microbatches(body, inputs, {0, 0}, captured);
}

TEST(Coalesce, DropoutDrawsAtOnceAndOthersForEach) {
  const Body body = [](Weights& w, const Tensors& in) {
    const auto x = torch::dropout(in[0] * w->scale, 0.5, true);
    return x + torch::dropout(w->row, 0.5, true);
  };
  const Tensors inputs = {torch::ones({kAll, 4}, doubles())};
  Captured captured = capture(body, inputs, {0});
  const Coalesced coalesced = coalesce(*captured.one, *captured.many, captured.axes, kFactor);
  std::vector<int> ordinals;
  for (const Operator& op : coalesced.graph.operators) {
    if (op.random_ordinal >= 0) ordinals.push_back(op.random_ordinal);
  }
  EXPECT_EQ(ordinals, (std::vector<int>{0, 1, 2, 3}));
}

TEST(Coalesce, NumbersThatChangeReachAllWhoUseThem) {
  double factor = 2.0;
  const Body body = training([&](Weights& w, const Tensors& in) {
    const auto x = in[0].mul(factor) * w->row;
    return x - x.mean(0).mul(factor);
  });
  const Tensors inputs = {torch::randn({kAll, 4}, doubles())};
  Captured captured = capture(body, inputs, {0});
  const Coalesced coalesced = coalesce(*captured.one, *captured.many, captured.axes, kFactor);
  factor = 3.0;
  const Function step = [&](const Tensors& t) { return Tensors{body(captured.weights, t)}; };
  const auto guarded =
      trace(captured.table, slice(inputs, 0, {0}), step, false, {captured.one.get()});
  ASSERT_EQ(guarded.match, captured.one.get());
  const Replayed got =
      replay(coalesced.graph, captured.table, inputs, {}, coalesced.constants(guarded.constants));
  for (int part = 0; part < kFactor; ++part) {
    const auto expected = body(captured.weights, slice(inputs, part, {0}));
    EXPECT_TRUE(torch::allclose(got.outputs[part], expected, kTolerance, kTolerance));
  }
}

std::string refusal_of(const Body& body, const Tensors& inputs) {
  return capture(body, inputs, first_axes(inputs)).axes.refusal;
}

TEST(Coalesce, RefusesAndSaysWhy) {
  const Tensors inputs = {torch::randn({kAll, 4}, doubles())};
  EXPECT_EQ(refusal_of(
                [](Weights& w, const Tensors& in) {
                  return torch::batch_norm(in[0], w->row, w->row, w->mean, w->variance, true, 0.1,
                                           1e-5, false);
                },
                inputs),
            "operator 0 (aten::batch_norm) writes buffer \"mean\", which the "
            "next microbatch would see");
  EXPECT_EQ(refusal_of([](Weights&, const Tensors& in) { return in[0].mul_(2); }, inputs),
            "operator 0 (aten::mul_.Scalar) writes input \"0\", which the next microbatch would "
            "see");
  EXPECT_EQ(refusal_of(
                [](Weights&, const Tensors& in) {
                  return in[0].size(0) > kSamples ? in[0].exp() : in[0].log();
                },
                inputs),
            "on 3 times the samples the function takes another way: operator 0 (aten::log) is "
            "aten::exp there");
  EXPECT_EQ(refusal_of(
                [](Weights& w, const Tensors& in) {
                  auto x = in[0] * w->scale;
                  for (int64_t i = 0; i < in[0].size(0); ++i) x = x + 1;
                  return x;
                },
                inputs),
            "on 3 times the samples the function takes another way: there are 7 operators instead "
            "of 3");
  EXPECT_EQ(refusal_of([](Weights&, const Tensors& in) { return in[0].sum(); }, inputs),
            "no operator is known to treat the samples independently");
  EXPECT_EQ(refusal_of(
                [](Weights& w, const Tensors& in) {
                  testing::backward(w->row.sum());
                  return in[0] * w->row;
                },
                inputs),
            "what it differentiates does not depend on the batch");
}

}  // namespace
}  // namespace smp::graph::testing
