// SPDX-License-Identifier: Apache-2.0
// Random functions of random operators, divided among random numbers of ranks: the divided
// functions give the results of one process.

#include <random>

#include "tests/nn/rewrite/harness.h"

namespace smp::nn::rewrite::testing {
namespace {

using torch::Tensor;

constexpr int kPrograms = 300;
constexpr int64_t kBatch = 4, kLength = 6, kWidth = 24;

/// Square weights, so that any operator may follow any other on [4, 6, 24].
struct WeightsImpl : torch::nn::Module {
  WeightsImpl() {
    torch::manual_seed(4);
    for (int i = 0; i < 4; ++i) {
      layers.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
      rows.push_back(register_parameter("row" + std::to_string(i), torch::randn({kWidth})));
    }
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    table = register_module("table", torch::nn::Embedding(12, kWidth));
    to(torch::kDouble);
  }
  std::vector<torch::nn::Linear> layers;
  std::vector<Tensor> rows;
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Embedding table{nullptr};
};
TORCH_MODULE(Weights);

/// A program is a list of numbers, each of which picks an operator and its operands.
class Program {
 public:
  explicit Program(uint32_t seed) {
    std::mt19937 random(seed);
    const int count = 4 + static_cast<int>(random() % 10);
    for (int i = 0; i < count; ++i) steps_.push_back(random());
  }

  Tensor run(Weights& weights, const Tensors& inputs) const {
    std::vector<Tensor> made = {inputs[0], weights->table(inputs[1])};
    for (uint32_t step : steps_) {
      const Tensor& x = made[made.size() - 1 - (step >> 8) % std::min<size_t>(made.size(), 3)];
      const Tensor& y = made[(step >> 16) % made.size()];
      made.push_back(apply(weights, step % 36, (step >> 24) % 4, x, y));
    }
    return made.back() + made[made.size() / 2] * weights->rows[0];
  }

 private:
  static Tensor by_head(const Tensor& x) {
    return x.reshape({kBatch, kLength, 12, 2}).transpose(1, 2);
  }

  static Tensor apply(Weights& w, uint32_t kind, uint32_t which, const Tensor& x, const Tensor& y) {
    switch (kind) {
      case 0:
      case 1:
      case 2:
      case 3:
      case 4:
        return w->layers[which](x);
      case 5:
        return torch::linear(x, w->layers[which]->weight.t());  // a tied weight, maybe
      case 6:
        return torch::linear(x, w->layers[which]->weight);
      case 7:
        return x + y;
      case 8:
        return x * torch::sigmoid(y);
      case 9:
        return torch::gelu(x);
      case 10:
        return (x * 2).relu_();
      case 11:
        return x * w->rows[which];
      case 12:
        return w->norm(x);
      case 13:
        return torch::dropout(x, 0.3, true);
      case 14: {
        const auto attention = torch::scaled_dot_product_attention(
            by_head(x), by_head(y), by_head(x), {}, which == 0 ? 0.2 : 0.0, which == 1);
        return attention.transpose(1, 2).reshape({kBatch, kLength, kWidth});
      }
      case 15:
        return (by_head(x).matmul(by_head(y).transpose(-2, -1)) / 3)
            .softmax(-1)
            .matmul(by_head(x))
            .transpose(1, 2)
            .flatten(2);
      case 16:
        return x.view({kBatch, kLength, 2, 12}).transpose(2, 3).reshape_as(x);
      case 17: {
        const auto parts = torch::cat({x, y}, -1).chunk(2, -1);
        return parts[0] - parts[1];
      }
      case 18: {
        const auto parts = x.chunk(2, -1);
        return torch::cat({parts[1], -parts[0]}, -1);
      }
      case 19:
        return x.mean(-1, true) + x.sum(1, true) - y;
      case 20: {
        auto copy = x.clone();
        copy.select(1, 1).mul_(0.5);
        return copy.add_(y);
      }
      case 21: {
        auto copy = x * 1.5;
        copy.slice(2, 0, 6).zero_();
        return copy;
      }
      case 22: {
        auto sum = w->layers[which](x);
        sum += y;
        return sum;
      }
      case 23:
        return torch::stack({x, y}, 1).amax(1);
      case 24:
        return torch::where(x > 0, y, w->rows[which]);
      case 25:
        return torch::glu(torch::cat({x, y}, -1), -1) + w->rows[which];
      case 26: {
        const auto parts = x.transpose(0, 1).contiguous().view({kLength, kBatch * 6, 4});
        const auto others = y.transpose(0, 1).reshape({kLength, kBatch * 6, 4});
        const auto scores = torch::bmm(parts.transpose(0, 1), others.permute({1, 2, 0}));
        return torch::bmm(torch::dropout(scores.softmax(-1), 0.1, true), others.transpose(0, 1))
            .transpose(0, 1)
            .reshape({kLength, kBatch, kWidth})
            .transpose(0, 1);
      }
      case 27:
        return (w->layers[which](x) + w->layers[3 - which](y)) * 0.5;
      case 28:
        return w->layers[which](x).mul_(2).relu_();
      case 29:
        return torch::layer_norm(by_head(x), {2}, w->rows[which].slice(0, 0, 2))
            .transpose(1, 2)
            .reshape({kBatch, kLength, kWidth});
      case 30:
        return x - torch::linear(x, w->layers[which]->weight.slice(0, 0, 12)).repeat({1, 1, 2});
      case 31:
        return torch::matmul(w->layers[which]->weight, x.transpose(1, 2)).transpose(1, 2);
      case 32: {
        const auto heads = x.unflatten(2, {3, 8}).unbind(2);
        return torch::stack({heads[2], heads[0], heads[1]}, 2).flatten(2).to(torch::kDouble);
      }
      case 33: {
        auto copy = y.clone();
        auto view = copy.view({kBatch, kLength, 4, 6});
        view.select(2, 1).add_(1);
        return copy * x.mean(at::IntArrayRef({0, 1}), true).expand({kBatch, kLength, kWidth});
      }
      case 34:
        return torch::conv1d(x.transpose(1, 2), w->layers[which]->weight.unsqueeze(-1),
                             w->layers[which]->bias)
            .transpose(1, 2);
      default:
        return x.masked_fill(y > 0.3, 0.1).tanh();
    }
  }

  std::vector<uint32_t> steps_;
};

class RandomTest : public ::testing::TestWithParam<int> {};

TEST_P(RandomTest, EqualsOneProcess) {
  Weights weights;
  const TensorTable table = table_of(*weights);
  constexpr int kEach = kPrograms / 10;
  int divided_parameters = 0, divided_streams = 0;
  for (int i = 0; i < kEach; ++i) {
    const auto seed = static_cast<uint32_t>(GetParam() * kEach + i);
    SCOPED_TRACE(seed);
    std::mt19937 random(seed + 1000);
    const Program program(seed);
    torch::manual_seed(seed);
    const Tensors inputs = {torch::randn({kBatch, kLength, kWidth}, torch::kDouble),
                            torch::randint(12, {kBatch, kLength})};
    const Function step = training([&](const Tensors& in) -> Tensors {
      const auto result = program.run(weights, in);
      return {result.square().mean(), result};
    });
    const auto whole = capture(table, inputs, step);
    const int ranks = 2 + static_cast<int>(random() % 3);
    DivideOptions options = eager_options(table, ranks);
    options.insist = random() % 2 == 0;
    for (const auto& entry : table.entries()) {
      if (random() % 8 == 0) options.allowed.erase(entry.name);
      // Now and then a parameter is divided whatever it costs.
      const auto sizes = entry.tensor.sizes().vec();
      const auto dim = static_cast<int64_t>(random() % sizes.size());
      const auto blocks = static_cast<int64_t>(1 + random() % 2);
      if (random() % 10 == 0 && sizes[dim] % (blocks * ranks) == 0) {
        options.fixed[entry.name] = {sizes, dim, blocks, ranks};
      }
    }
    const DividedGraph divided = divide(*whole, options);
    divided_parameters += static_cast<int>(divided.parameters.size());
    expect_equals_plain(divided, *weights, table, inputs, step, ranks);
    expect_metas_hold(divided, table, inputs, ranks);
    options.residual_streams = true;
    options.activation_us_per_byte = random() % 2 == 0 ? 100 : 0;
    const DividedGraph in_parts = divide(*whole, options);
    for (const ResidualStreamDecision& stream : in_parts.residual_streams)
      divided_streams += stream.dim >= 0;
    if (in_parts.graph.to_string() != divided.graph.to_string()) {
      expect_equals_plain(in_parts, *weights, table, inputs, step, ranks);
      expect_metas_hold(in_parts, table, inputs, ranks);
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(divided_parameters, kEach);
  EXPECT_GT(divided_streams, kEach / 6);
}

INSTANTIATE_TEST_SUITE_P(Programs, RandomTest, ::testing::Range(0, 10));

}  // namespace
}  // namespace smp::nn::rewrite::testing
