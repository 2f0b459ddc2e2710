// SPDX-License-Identifier: Apache-2.0
#include <ATen/autocast_mode.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <map>
#include <string>

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

/// The backward of a bag whose gradient is dense multiplies and adds at once, and rounds once.
TEST(Replay, SparseGradientsAreThoseOfPlainLibtorchMadeDense) {
  const auto bag = [](bool sparse, torch::nn::EmbeddingBagMode mode) {
    return torch::nn::EmbeddingBag(
        torch::nn::EmbeddingBagOptions(9, 4).mode(std::move(mode)).sparse(sparse));
  };
  for (const bool sparse : {true, false}) {
    torch::manual_seed(4);
    torch::nn::Embedding words(torch::nn::EmbeddingOptions(9, 4).sparse(sparse));
    torch::nn::EmbeddingBag sums = bag(sparse, torch::kSum), means = bag(sparse, torch::kMean);
    torch::nn::Module module;
    module.register_module("words", words);
    module.register_module("sums", sums);
    module.register_module("means", means);
    const auto function = [&](const Tensors& in) -> Tensors {
      auto y = words(in[0]).sum(1) * sums(in[0], torch::Tensor(), in[1]) * means(in[0]);
      backward(y.sum());
      return {y};
    };
    const Tensors inputs{torch::randint(0, 9, {6, 7}), torch::randn({6, 7})};
    const TensorTable table = table_of(module);
    const Replayed replayed = replay(*trace(table, inputs, function).recorded, table, inputs);
    function(inputs);
    for (const auto& item : module.named_parameters()) {
      const torch::Tensor expected = item.value().grad();
      EXPECT_EQ(expected.is_sparse(), sparse);
      const torch::Tensor& got = replayed.gradients.at(item.key());
      EXPECT_FALSE(got.is_sparse());
      EXPECT_TRUE(torch::equal(got, expected.to_dense())) << item.key();
    }
  }
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

/// Data that host code filled are kept wherever they are first used: by an operator that writes a
/// part of it, by one that reads and writes it, as a result, as a gradient, or nowhere.
TEST(Replay, LiteralsThatAreWrittenReturnedOrUnused) {
  const auto function = [](Weight& net, torch::Tensor x) {
    auto in_part = torch::tensor(std::vector<float>{1, 2, 3, 4});
    in_part.slice(0, 0, 2).copy_(x[0].slice(0, 0, 2));
    auto scaled = torch::tensor(std::vector<float>{1, 2, 3, 4}).mul_(x[0]);
    auto unused = torch::tensor(std::vector<float>{5, 6});
    auto scratch = torch::empty({4}).fill_(2);
    return torch::matmul(x, net->weight) * in_part + scaled * scratch;
  };
  expect_equal_for(function);
  torch::manual_seed(1);
  Weight net(std::vector<int64_t>{4, 4});
  const TensorTable table = table_of(*net);
  const Tensors inputs{torch::randn({4, 4})};
  const auto returning = [&](const Tensors& in) -> Tensors {
    return {function(net, in[0]), torch::tensor(std::vector<float>{7, 8}),
            torch::arange(3).unsqueeze(0)};
  };
  for (const bool execute : {true, false}) {
    const auto recorded = trace(table, inputs, returning, execute).recorded;
    const auto again = trace(table, inputs, returning, false, {recorded.get()});
    EXPECT_EQ(again.match, recorded.get()) << again.difference;
    EXPECT_TRUE(again.contents.empty());
    const auto expected = returning(inputs);
    const auto replayed = replay(*recorded, table, inputs);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(torch::equal(replayed.outputs[i], expected[i])) << i << recorded->to_string();
    }
  }
}

TEST(Replay, EmptyTensorsFilledByTheHostAndResultsThatNoOperatorReads) {
  torch::manual_seed(3);
  Weight net(std::vector<int64_t>{4, 4});
  const auto function = [&](const Tensors& in) -> Tensors {
    auto filled = torch::empty({4});
    for (int i = 0; i < 4; ++i) filled.data_ptr<float>()[i] = 0.5f * i;
    auto returned = torch::zeros({2});
    returned.accessor<float, 1>()[1] = 3;
    auto written = torch::empty({4, 4});
    written.copy_(torch::matmul(in[0], net->weight));
    auto loss = (written * filled).sum();
    backward(loss);
    return {loss, returned, written};
  };
  expect_replay_equals_eager(*net, {torch::randn({4, 4})}, {torch::randn({4, 4})}, function);
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

/// The modes of each operator: autocast, inference, no gradients.
TEST(Replay, RegionsOfAutocastAndInference) {
  expect_equal_for([](Weight& net, torch::Tensor x) {
    torch::Tensor y, z;
    {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      const auto off = c10::make_scope_exit([] {
        at::autocast::clear_cache();
        at::autocast::set_autocast_enabled(at::kCPU, false);
      });
      y = torch::matmul(x, net->weight);
      EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
    }
    {
      const torch::InferenceMode inference;
      z = x.softmax(-1) * 2;
    }
    return y.to(torch::kFloat) * z.clone();
  });
}

TEST(Replay, DetachedDataIsNotDifferentiated) {
  expect_equal_for([](Weight& net, torch::Tensor x) {
    auto y = torch::matmul(x, net->weight);
    return y * y.data() + y.detach();
  });
}

/// The function's tensors have no data, but show shapes and flags as in one process.
TEST(Replay, ShapesAndFlagsAfterInPlaceOperators) {
  expect_equal_for([](Weight& net, torch::Tensor x) {
    auto y = torch::matmul(x, net->weight);
    y.unsqueeze_(0);
    auto z = torch::zeros({4, 4});
    EXPECT_FALSE(z.requires_grad());
    z.add_(y[0]);
    EXPECT_TRUE(z.requires_grad());
    auto constant = y.clone().detach_();
    EXPECT_FALSE(constant.requires_grad());
    z.t_().slice(0, 0, 3);
    return y.sum(0) * static_cast<double>(y.dim()) + z + constant[0];
  });
}

/// A microbatch of an input lies somewhere inside the batch.
TEST(Replay, StridedViewsOfInputs) {
  torch::manual_seed(3);
  Weight net(std::vector<int64_t>{4});
  const auto function = [&](const Tensors& in) -> Tensors {
    auto diagonal = in[0].as_strided({4}, {5}, 0);
    auto loss = (diagonal * net->weight.as_strided({2, 2}, {1, 1}, 1).sum()).sum();
    backward(loss);
    return {loss, in[0].as_strided({2, 2}, {4, 1})};
  };
  const TensorTable table = table_of(*net);
  const auto traced = trace(table, {torch::randn({4, 4})}, function);
  const auto batch = torch::randn({8, 4});
  const auto replayed = replay(*traced.recorded, table, {batch.narrow(0, 4, 4)});
  const Tensors eager = function({batch.narrow(0, 4, 4).clone()});
  EXPECT_TRUE(torch::equal(replayed.outputs[0], eager[0]));
  EXPECT_TRUE(torch::equal(replayed.outputs[1], eager[1]));
}

/// Views of registered tensors that no operator of the step made.
TEST(Replay, ViewsOfBuffersMadeOutside) {
  torch::manual_seed(3);
  Weight net(std::vector<int64_t>{4, 4});
  net->counter.resize_({2, 4}).fill_(1);
  const auto row = net->counter[1];
  const auto flat = net->weight.data().view(-1).slice(0, 2, 6);
  const auto function = [&](const Tensors& in) -> Tensors {
    net->counter.mul_(2);
    auto loss = (torch::matmul(in[0], net->weight) * row * flat).sum();
    backward(loss);
    return {loss};
  };
  expect_replay_equals_eager(*net, {torch::randn({4, 4})}, {torch::randn({4, 4})}, function);
}

/// A run on data lets go of tensors that the function cannot reach any more, and of nothing else.
TEST(Replay, TensorsThatNoOperatorMadeAreReadAgainMuchLater) {
  torch::manual_seed(3);
  Weight net(std::vector<int64_t>{4, 4});
  net->counter.resize_({2, 4}).fill_(1);
  const auto row = net->counter[1];
  expect_replay_equals_eager(*net, {torch::randn({4, 4})}, {torch::randn({4, 4})},
                             [&](const Tensors& in) -> Tensors {
                               auto h = torch::matmul(in[0], net->weight);
                               const auto data = h.data();
                               auto y = h * row + data;
                               for (int i = 0; i < 150; ++i) y = y * 0.99;
                               auto loss = (y * row * data).sum();
                               backward(loss);
                               return {loss};
                             });
}

/// A member that is not registered: its content is a constant, compared in each run.
TEST(Replay, MembersOutsideTheModuleAreConstantsThatMayChange) {
  torch::manual_seed(3);
  Weight net(std::vector<int64_t>{4, 4});
  auto scale = torch::full({4}, 2.0);
  const auto function = [&](const Tensors& in) -> Tensors {
    return {torch::matmul(in[0], net->weight) * scale};
  };
  const TensorTable table = table_of(*net);
  const Tensors inputs{torch::randn({4, 4})};
  const auto traced = trace(table, inputs, function);
  scale = torch::full({4}, 3.0);
  const auto again = trace(table, inputs, function, false, {traced.recorded.get()});
  ASSERT_EQ(again.match, traced.recorded.get()) << again.difference;
  ASSERT_EQ(again.contents.size(), 1u);
  EXPECT_TRUE(torch::equal(again.contents[0].content, scale));
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

/// The values that a graph does not make itself.
Environment environment_of(const Graph& graph, const TensorTable& table, const Tensors& inputs) {
  Environment environment(graph.values.size());
  for (size_t id = 0; id < graph.values.size(); ++id) {
    const Value& value = graph.values[id];
    if (value.kind == ValueKind::kInput) environment[id] = inputs[std::stoi(value.name)];
    if (value.content.defined()) environment[id] = value.content;
    if (value.kind == ValueKind::kParameter || value.kind == ValueKind::kBuffer) {
      environment[id] = table.at(value.name).tensor;
    }
  }
  return environment;
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
  const Environment environment = environment_of(graph, table, inputs);
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
    EXPECT_NE(
        std::string(error.what())
            .find("operator 0 (aten::conv2d, in module \"conv\") gives another result when it "
                  "is replayed"),
        std::string::npos)
        << error.what();
  }
}

struct StatisticsImpl : torch::nn::Module {
  StatisticsImpl() {
    weight = register_parameter("weight", torch::ones({3}));
    mean = register_buffer("mean", torch::zeros({3}));
    variance = register_buffer("variance", torch::ones({3}));
  }
  torch::Tensor weight, mean, variance;
};
TORCH_MODULE(Statistics);

/// Its schema does not say that it writes the running statistics, as that of batch norm does not.
TEST(Replay, StatisticsAreUpdatedWithoutANorm) {
  Statistics net;
  const Tensors inputs{torch::randn({8, 3})};
  const Function function = [&](const Tensors& in) -> Tensors {
    at::batch_norm_update_stats(in[0] * 3, net->mean, net->variance, 0.1);
    auto loss = ((in[0] - net->mean) * net->weight / net->variance).sum();
    backward(loss);
    return {loss};
  };
  const TraceResult traced = trace(table_of(*net), inputs, function);
  const Operator& update = traced.recorded->operators[1];
  EXPECT_EQ(update.name(), "aten::batch_norm_update_stats");
  EXPECT_EQ(update.writes.size(), 2u);
  expect_replay_equals_eager(*net, inputs, {torch::randn({8, 3})}, function);
}

/// A number that libtorch wraps into a tensor does not decide the type, where other tensors would.
TEST(Replay, AConstantIsAWrappedNumber) {
  torch::nn::Linear net(3, 3);
  const torch::Tensor half = c10::scalar_to_tensor(0.5);
  half.unsafeGetTensorImpl()->set_wrapped_number(true);
  expect_replay_equals_eager(*net, {torch::randn({2, 3})}, {torch::randn({2, 3})},
                             [&](const Tensors& in) -> Tensors {
                               const auto scaled = (in[0] > 0).to(torch::kLong) * half;
                               EXPECT_EQ(scaled.scalar_type(), torch::kFloat);
                               auto loss = (net(in[0]) * scaled).sum();
                               backward(loss);
                               return {loss};
                             });
}

/// tanh keeps its result; nothing needs those of the layer and of the sums.
TEST(Replay, MeasuresWhichResultsBackwardsKeep) {
  torch::nn::Linear net(3, 3);
  const TensorTable table = table_of(*net);
  const Tensors inputs{torch::randn({2, 3})};
  TraceResult traced = trace(table, inputs, [&](const Tensors& in) -> Tensors {
    auto loss = (torch::tanh(net(in[0])) + 1).sum();
    backward(loss);
    return {loss};
  });
  for (const bool memory : {false, true}) {
    Graph& graph = *traced.recorded;
    measure_costs(graph, environment_of(graph, table, inputs), {}, traced.checksums, "train",
                  MeasureOptions().memory(memory));
    std::map<std::string, int64_t> saved;
    for (const Operator& op : graph.operators) saved[op.name()] = op.cost.saved_bytes;
    const std::map<std::string, int64_t> expected = {{"aten::t", 0},
                                                     {"aten::addmm", 0},
                                                     {"aten::tanh", 24},
                                                     {"aten::add.Scalar", 0},
                                                     {"aten::sum", 0}};
    EXPECT_EQ(saved, expected) << memory;
  }
}

/// The product saves a tensor that it then writes, so its own backward is impossible; the program's
/// never goes through it.
TEST(Replay, MeasuresOperatorsThatCannotGoBack) {
  torch::nn::Linear net(3, 3);
  const TensorTable table = table_of(*net);
  const Tensors inputs{torch::randn({2, 3})};
  TraceResult traced = trace(table, inputs, [&](const Tensors& in) -> Tensors {
    auto loss = net(in[0]).sum();
    backward(loss);
    return {loss.mul_(loss)};
  });
  Graph& graph = *traced.recorded;
  measure_costs(graph, environment_of(graph, table, inputs), {}, traced.checksums, "train");
  EXPECT_GT(graph.operators.front().cost.backward_us, 0);
  EXPECT_EQ(graph.operators.back().name(), "aten::mul_.Tensor");
  EXPECT_EQ(graph.operators.back().cost.backward_us, 0);
}

/// A view of a factory's result shows the numbers with which host code fills it afterwards.
TEST(Replay, MeasuresViewsOfWhatHostCodeFillsLater) {
  const TensorTable table;
  const Tensors inputs{torch::randn({2, 3})};
  TraceResult traced = trace(table, inputs, [&](const Tensors& in) -> Tensors {
    auto mask = torch::zeros({6});
    auto rows = mask.view({2, 3});
    mask.data_ptr<float>()[4] = 2;
    return {in[0] * rows, mask.view({3, 2})};
  });
  Graph& graph = *traced.recorded;
  EXPECT_EQ(std::count(traced.checksums.begin(), traced.checksums.end(), 0u), 1) << "read by then";
  measure_costs(graph, environment_of(graph, table, inputs), {}, traced.checksums, "train");
  EXPECT_TRUE(torch::equal(replay(graph, table, inputs).outputs[1],
                           torch::tensor({{0.f, 0.f}, {0.f, 0.f}, {2.f, 0.f}})));
}

/// It requires a gradient, but an operator in place saves nothing for one.
TEST(Replay, MeasuresViewsMadeUnderNoGrad) {
  torch::nn::Linear net(3, 2);
  const TensorTable table = table_of(*net);
  const Tensors inputs = {torch::randn({2})};
  auto traced = trace(table, inputs, [&](const Tensors& in) -> Tensors {
    torch::Tensor view;
    {
      const torch::NoGradGuard no_grad;
      view = net->bias.view({2});
    }
    auto sum = torch::zeros({2}).addcmul_(in[0], net->bias);
    sum.addcmul_(sum, view);
    backward(sum.sum());
    return {sum};
  });
  Graph& graph = *traced.recorded;
  measure_costs(graph, environment_of(graph, table, inputs), {}, traced.checksums, "train");
  EXPECT_TRUE(torch::equal(replay(graph, table, inputs).gradients.at("bias"),
                           inputs[0] * (1 + net->bias.detach())));
}

}  // namespace
}  // namespace smp::graph::testing
