#include "tests/graph/harness.h"

namespace smp::graph::testing {
namespace {

namespace F = torch::nn::functional;

struct ConvNetImpl : torch::nn::Module {
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear fc{nullptr};
  torch::nn::Dropout dropout{nullptr};
  ConvNetImpl() {
    conv = register_module("conv", torch::nn::Conv2d(1, 4, 3));
    norm = register_module("norm", torch::nn::BatchNorm2d(4));
    fc = register_module("fc", torch::nn::Linear(4 * 4, 5));
    dropout = register_module("dropout", torch::nn::Dropout(0.3));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = norm(conv(x)).relu_();
    x = torch::adaptive_avg_pool2d(x, {2, 2}).flatten(1);
    return torch::log_softmax(fc(dropout(x)), 1);
  }
};
TORCH_MODULE(ConvNet);

TEST(Replay, ConvNetWithBatchNormAndDropout) {
  torch::manual_seed(1);
  ConvNet net;
  const auto function = [&](const Tensors& in) -> Tensors {
    auto output = net(in[0]);
    auto loss = torch::nll_loss(output, in[1]);
    backward(loss);
    return {output, loss};
  };
  expect_replay_equals_eager(*net, {torch::randn({6, 1, 8, 8}), torch::randint(5, {6})},
                             {torch::randn({6, 1, 8, 8}), torch::randint(5, {6})}, function);
}

struct TransformerImpl : torch::nn::Module {
  torch::nn::Embedding embedding{nullptr};
  torch::nn::TransformerEncoder encoder{nullptr};
  torch::nn::LSTM lstm{nullptr};
  TransformerImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(11, 16));
    encoder = register_module(
        "encoder", torch::nn::TransformerEncoder(
                       torch::nn::TransformerEncoderLayer(
                           torch::nn::TransformerEncoderLayerOptions(16, 2).dropout(0.1)),
                       2));
    lstm = register_module("lstm", torch::nn::LSTM(16, 16));
  }
  torch::Tensor forward(torch::Tensor ids) {
    auto x = encoder(embedding(ids));
    x = std::get<0>(lstm(x));
    return torch::matmul(x, embedding->weight.t());  // a tied head
  }
};
TORCH_MODULE(Transformer);

TEST(Replay, TransformerAndLstmWithTiedHead) {
  torch::manual_seed(2);
  Transformer net;
  const auto function = [&](const Tensors& in) -> Tensors {
    auto logits = net(in[0]);
    auto loss = F::cross_entropy(logits.flatten(0, 1), in[0].flatten());
    backward(loss);
    return {loss};
  };
  expect_replay_equals_eager(*net, {torch::randint(11, {7, 3})}, {torch::randint(11, {7, 3})},
                             function);
}

/// A module of one weight, for functions that only need something to differentiate.
struct WeightImpl : torch::nn::Module {
  torch::Tensor weight, counter;
  explicit WeightImpl(std::vector<int64_t> sizes) {
    weight = register_parameter("weight", torch::randn(sizes));
    counter = register_buffer("counter", torch::zeros({1}));
  }
};
TORCH_MODULE(Weight);

void expect_equal_for(const std::function<torch::Tensor(Weight&, torch::Tensor)>& body) {
  torch::manual_seed(3);
  Weight net(std::vector<int64_t>{4, 4});
  const auto function = [&](const Tensors& in) -> Tensors {
    auto result = body(net, in[0]);
    auto loss = result.pow(2).sum();
    backward(loss);
    return {result, loss};
  };
  expect_replay_equals_eager(*net, {torch::randn({4, 4})}, {torch::randn({4, 4})}, function);
}

TEST(Replay, ViewsAndInPlaceOperators) {
  expect_equal_for([](Weight& net, torch::Tensor x) {
    auto y = torch::matmul(x, net->weight);
    auto row = y[1];
    row.mul_(2);
    y.slice(1, 0, 2).add_(1);
    return y.relu_() + row.unsqueeze(0);
  });
}

TEST(Replay, RandomFactoriesAreDrawnAnew) {
  expect_equal_for([](Weight& net, torch::Tensor x) {
    auto noise = torch::randn({4, 4});
    return torch::matmul(x, net->weight) + noise + torch::rand_like(x) + torch::zeros({4, 4});
  });
}

TEST(Replay, LiteralsAndConstants) {
  const auto outside = torch::randn({4});
  expect_equal_for([&](Weight& net, torch::Tensor x) {
    auto literal = torch::tensor(std::vector<float>{1, 2, 3, 4});
    auto filled = torch::zeros({4});
    filled.accessor<float, 1>()[2] = 5;
    return torch::matmul(x, net->weight) * literal + outside + filled;
  });
}

TEST(Replay, OptionalTensorListsAndMasks) {
  expect_equal_for([](Weight& net, torch::Tensor x) {
    using torch::indexing::Slice;
    auto y = torch::matmul(x, net->weight);
    auto order = torch::arange(3, -1, -1);
    auto picked = y.index({Slice(), order});
    y = y.index_put({order}, picked);
    return torch::where(y > 0, y, y * 0.1);
  });
}

TEST(Replay, NoGradRegionsAndBuffers) {
  expect_equal_for([](Weight& net, torch::Tensor x) {
    auto y = torch::matmul(x, net->weight);
    {
      torch::NoGradGuard no_grad;
      net->counter.add_(y.mean());
      y = y + torch::matmul(x, net->weight).mean();
    }
    return y + torch::matmul(net->weight, x) + net->counter;
  });
}

TEST(Replay, DetachedDataIsNotDifferentiated) {
  expect_equal_for([](Weight& net, torch::Tensor x) {
    auto y = torch::matmul(x, net->weight);
    return y * y.data() + y.detach();
  });
}

TEST(Replay, LongSkipsAndSeveralConsumers) {
  expect_equal_for([](Weight& net, torch::Tensor x) {
    auto a = torch::matmul(x, net->weight);
    auto b = torch::tanh(a);
    auto c = torch::matmul(b + a, net->weight);
    auto parts = torch::chunk(c + a * b, 2, 1);
    return torch::cat({parts[1], parts[0] + a.slice(1, 0, 2)}, 1);
  });
}

TEST(Replay, MeasuresCostsAndAgreesWithTheRecordedRun) {
  torch::manual_seed(4);
  ConvNet net;
  const TensorTable table = table_of(*net);
  const Tensors inputs{torch::randn({6, 1, 8, 8}), torch::randint(5, {6})};
  const auto function = [&](const Tensors& in) -> Tensors {
    auto loss = torch::nll_loss(net(in[0]), in[1]);
    backward(loss);
    return {loss};
  };
  std::vector<torch::Tensor> before;
  for (const auto& buffer : net->buffers()) before.push_back(buffer.clone());
  const auto restore = [&] {
    for (size_t i = 0; i < before.size(); ++i) net->buffers()[i].copy_(before[i]);
  };
  TraceResult traced = trace(table, inputs, function);
  restore();
  Graph& graph = *traced.recorded;
  Environment environment(graph.values.size());
  for (size_t id = 0; id < graph.values.size(); ++id) {
    const Value& value = graph.values[id];
    if (value.kind == ValueKind::kInput) environment[id] = inputs[std::stoi(value.name)];
    if (value.content.defined()) environment[id] = value.content;
    if (value.kind == ValueKind::kParameter || value.kind == ValueKind::kBuffer) {
      environment[id] = table.at(value.name).tensor;
    }
  }
  Graph copy = graph;
  measure_costs(graph, environment, {}, traced.checksums, "train");
  double forward = 0, backward_time = 0;
  for (const Operator& op : graph.operators) {
    forward += op.cost.forward_us;
    backward_time += op.cost.backward_us;
  }
  EXPECT_GT(forward, 0);
  EXPECT_GT(backward_time, 0);
  costs_from_bytes(copy, costs_to_bytes(graph));
  EXPECT_EQ(costs_to_bytes(copy), costs_to_bytes(graph));
  // Another result than the recorded one is noticed and named.
  auto wrong = traced.checksums;
  wrong[0] ^= 1;
  restore();
  try {
    measure_costs(graph, environment, {}, wrong, "train");
    FAIL();
  } catch (const CaptureError& error) {
    EXPECT_NE(std::string(error.what()).find("operator 0 (aten::conv2d, in module \"conv\")"),
              std::string::npos)
        << error.what();
  }
}

TEST(Replay, AlignedCopiesKeepSizesStridesAndValues) {
  const auto base = torch::randn({9, 7});
  const auto odd = base.slice(0, 1);  // starts 28 bytes in
  const auto copy = aligned(odd);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(copy.data_ptr()) % 64, 0u);
  EXPECT_EQ(copy.strides(), odd.strides());
  EXPECT_TRUE(torch::equal(copy, odd));
  const auto expanded = base.slice(0, 1, 2).slice(1, 1, 2).expand({5, 3});
  EXPECT_TRUE(torch::equal(aligned(expanded), expanded));
  EXPECT_EQ(aligned(expanded).strides(), expanded.strides());
  EXPECT_TRUE(aligned(base).is_same(base));
}

}  // namespace
}  // namespace smp::graph::testing
