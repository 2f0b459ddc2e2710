// SPDX-License-Identifier: Apache-2.0
#include "graph/serialize.h"

#include <gtest/gtest.h>
#include <torch/library.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <random>

#include "graph/content.h"
#include "partitioner/partition.h"
#include "tests/error_of.h"
#include "tests/graph/harness.h"
#include "tests/partitioner/graph_builder.h"
#include "tests/smp/models.h"

namespace smp::graph::testing {
namespace {

using partitioner::testing::GraphBuilder;
using partitioner::testing::Ref;
using smp::testing::error_of;
using smp::testing::error_or_none;

Graph reloaded(const Graph& graph) {
  return saved_graph_from_json(graph_to_json(graph), "graph.json").graph;
}

/// A graph as the first step of a program has it: captured on data, with measured costs.
template <class Module>
std::unique_ptr<Graph> captured(Module module, const Tensors& batch) {
  const TensorTable table = table_of(*module);
  auto graph = std::move(trace(table, batch, [&](const Tensors& inputs) {
                           const auto loss = module->loss(inputs[0], inputs[1]);
                           backward(loss);
                           return Tensors{loss};
                         }).recorded);
  Environment environment(graph->values.size());
  for (size_t id = 0; id < graph->values.size(); ++id) {
    const Value& value = graph->values[id];
    if (value.kind == ValueKind::kInput) environment[id] = batch[std::stoul(value.name)];
    if (value.content.defined()) environment[id] = value.content.clone();
    if (value.kind == ValueKind::kParameter || value.kind == ValueKind::kBuffer) {
      environment[id] = table.at(value.name).tensor;
    }
  }
  measure_costs(*graph, environment, {}, {}, "train");
  return graph;
}

void expect_equal_graphs(const Graph& a, const Graph& b) {
  EXPECT_EQ(a.to_string(), b.to_string());
  EXPECT_EQ(a.fingerprint(), b.fingerprint());
  EXPECT_EQ(costs_to_bytes(a), costs_to_bytes(b));
  EXPECT_EQ(a.alias_sets, b.alias_sets);
  EXPECT_EQ(a.inputs, b.inputs);
  EXPECT_EQ(a.outputs, b.outputs);
  ASSERT_EQ(a.values.size(), b.values.size());
  for (size_t i = 0; i < a.values.size(); ++i) {
    EXPECT_EQ(a.values[i].kind, b.values[i].kind);
    EXPECT_EQ(a.values[i].name, b.values[i].name);
    EXPECT_EQ(a.values[i].meta, b.values[i].meta);
    EXPECT_EQ(a.values[i].producer, b.values[i].producer);
    EXPECT_EQ(a.values[i].alias_set, b.values[i].alias_set);
  }
  ASSERT_EQ(a.operators.size(), b.operators.size());
  for (size_t i = 0; i < a.operators.size(); ++i) {
    const Operator& x = a.operators[i];
    const Operator& y = b.operators[i];
    EXPECT_EQ(x.results, y.results);
    EXPECT_EQ(x.result_is_argument, y.result_is_argument);
    EXPECT_EQ(x.list_lengths, y.list_lengths);
    EXPECT_EQ(x.writes, y.writes);
    EXPECT_EQ(x.mode, y.mode);
    EXPECT_EQ(x.reads_parameter, y.reads_parameter);
    EXPECT_EQ(x.scope, y.scope);
    EXPECT_EQ(x.random_ordinal, y.random_ordinal);
    EXPECT_EQ(x.first_result, y.first_result);
    for (size_t j = 0; j < x.arguments.size(); ++j) {
      EXPECT_EQ(x.arguments[j].kind, y.arguments[j].kind);
      EXPECT_EQ(x.arguments[j].values, y.arguments[j].values);
      EXPECT_EQ(constant_to_string(x.arguments[j].constant),
                constant_to_string(y.arguments[j].constant))
          << a.line(i);
    }
  }
}

/// A step that multiplies integers by a number that libtorch has wrapped.
std::unique_ptr<Graph> with_wrapped_number(const at::Scalar& number) {
  const at::Tensor wrapped = wrapped_number(number);
  return std::move(trace(TensorTable(), {torch::arange(4)}, [&](const Tensors& inputs) {
                     return Tensors{at::mul(inputs[0], wrapped)};
                   }).recorded);
}

void expect_same_plans(const Graph& a, const Graph& b) {
  for (int stages = 1; stages <= 4; ++stages) {
    const auto options = partitioner::PartitionOptions(stages).memory_weight(0.2);
    const auto plan_a = partitioner::partition(a, options);
    const auto plan_b = partitioner::partition(b, options);
    EXPECT_EQ(plan_a.to_string(), plan_b.to_string());
    EXPECT_EQ(plan_a.reason_of_operator, plan_b.reason_of_operator);
  }
}

TEST(Serialize, CapturedGraphsComeBackAndArePlannedTheSame) {
  for (const bool tied : {false, true}) {
    const auto graph = captured(smp::testing::TinyGpt(tied), smp::testing::TinyGptImpl::batch(2));
    const Graph again = reloaded(*graph);
    expect_equal_graphs(*graph, again);
    expect_same_plans(*graph, again);
  }
  const auto graph =
      captured(smp::testing::TinyConvNet(), {torch::randn({4, 1, 8, 8}), torch::randint(5, {4})});
  const Graph again = reloaded(*graph);
  expect_equal_graphs(*graph, again);
  expect_same_plans(*graph, again);
  EXPECT_EQ(graph_to_json(*graph), graph_to_json(again));
}

TEST(Serialize, FilesComeBack) {
  const std::string path = ::testing::TempDir() + "serialize_test.json";
  GraphBuilder b;
  b.output(b.op("aten::relu", {b.input(torch::ones({2, 2}))}));
  save_graph(b.graph(), path);
  expect_equal_graphs(b.graph(), load_graph(path).graph);
  std::filesystem::remove(path);
}

TEST(Serialize, OptimizerStatesComeBack) {
  GraphBuilder b;
  b.output(b.op("aten::relu", {b.input(torch::ones({2, 2}))}));
  const std::map<std::string, double> state = {{"a.weight", 2}, {"b \"c\"", 0.5}};
  const std::string text = graph_to_json(b.graph(), state);
  EXPECT_EQ(saved_graph_from_json(text, "text").optimizer_state, state);
  expect_equal_graphs(b.graph(), saved_graph_from_json(text, "text").graph);
  EXPECT_TRUE(saved_graph_from_json(graph_to_json(b.graph()), "text").optimizer_state.empty());
  const std::map<double, std::string> refused = {{-1, "-1.0"}, {1e7, "10000000.0"}};
  for (const auto& [factor, shown] : refused) {
    const std::string wrong = graph_to_json(b.graph(), {{"a", factor}});
    EXPECT_EQ(error_of<ConfigError>([&] { saved_graph_from_json(wrong, "text"); }),
              "[smp] text: \"optimizer_state[0].bytes_per_byte\": expected a number from 0 to "
              "1000000, got " +
                  shown + ".");
  }
}

TEST(Serialize, EveryKindOfConstant) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  GraphBuilder b;
  b.grad_mode = false;
  const Ref x = b.input(torch::rand({1, 1, 4, 4}));
  const Ref mask = b.op("aten::gt.Scalar", {x, 0.5});
  b.op("aten::masked_fill.Scalar", {x, mask, -kInfinity});
  b.op("aten::masked_fill.Scalar", {x, mask, kInfinity});
  b.op("aten::masked_fill.Scalar", {x, mask, std::numeric_limits<double>::quiet_NaN()});
  b.op("aten::mul.Scalar", {x, 1.0 / 3});
  b.op("aten::mul.Scalar", {x, c10::IValue(c10::complex<double>(1.5, -kInfinity))});
  b.op("aten::gelu", {x, c10::IValue("tanh")});
  b.op("aten::upsample_nearest2d.vec",
       {x, c10::IValue(), c10::IValue(c10::List<double>({2.0, 1.5}))});
  b.op("aten::sum.dim_IntList",
       {x, c10::IValue(c10::List<int64_t>({1, -1})), c10::IValue(true), c10::IValue()});
  b.op("aten::permute", {x, c10::IValue(c10::List<int64_t>({0, 1, 3, 2}))});
  b.op("aten::_to_copy",
       {x, c10::IValue(static_cast<int64_t>(at::kDouble)), c10::IValue(),
        c10::IValue(at::Device("cpu")), c10::IValue(), c10::IValue(false), c10::IValue()});
  b.op("aten::reshape", {b.op("aten::sum", {x, c10::IValue()}), c10::IValue(c10::List<int64_t>())});
  expect_equal_graphs(b.graph(), reloaded(b.graph()));
}

TEST(Serialize, ModesListsAndUndefinedTensors) {
  GraphBuilder b;
  const Ref x = b.input(torch::rand({4, 4}));
  b.op("aten::relu", {x});
  ExecutionMode& mode = b.graph().operators.back().mode;
  mode.grad = false;
  mode.inference = true;
  mode.below_autograd = true;
  mode.below_views = true;
  mode.default_dtype = at::kDouble;
  mode.autocast_cpu = true;
  mode.autocast_accelerator = true;
  mode.autocast_cpu_dtype = at::kHalf;
  mode.autocast_accelerator_dtype = at::kBFloat16;
  mode.autocast_cache = false;
  mode.after_backward = true;
  mode.partition = 3;
  const Ref parts = b.op("aten::unbind.int", {x, 0});
  b.graph().operators.back().list_lengths = {4};
  b.op("aten::stack", {std::vector<Ref>{parts, parts}, 0});
  b.op("aten::layer_norm",
       {x, c10::IValue(c10::List<int64_t>({4})), c10::IValue(), c10::IValue(), 1e-5, true});
  b.graph().operators.back().arguments[2] = {Argument::Kind::kTensor, {}, {kUndefined}};
  b.op("aten::gather", {x, 0, b.input(torch::zeros({2, 2}, torch::kLong)), false});
  b.graph().operators.back().random_ordinal = 2;
  b.graph().inputs.push_back(kUndefined);
  b.output(x);
  b.backward(parts, x);
  b.graph().roots.back().mode.autocast_cpu = true;
  expect_equal_graphs(b.graph(), reloaded(b.graph()));
}

TEST(Serialize, ContentsOfConstantsAreLeftOutTheirSizesKept) {
  GraphBuilder b;
  const Ref constant = b.constant(torch::ones({64, 64}));
  b.output(b.op("aten::mul.Tensor", {b.input(torch::ones({64, 64})), constant}));
  const std::string text = graph_to_json(b.graph());
  EXPECT_LT(text.size(), 2000u);
  const Graph again = saved_graph_from_json(text, "graph.json").graph;
  EXPECT_FALSE(again.values[constant.id].content.defined());
  EXPECT_EQ(again.values[constant.id].meta.nbytes(), 64 * 64 * 4);
}

/// The tool that plans has none of the user's extensions.
TEST(Serialize, OperatorsOfAnExtensionThatIsNotLoaded) {
  constexpr const char* kSchema =
      "shift(Tensor(a!) self, Tensor? by, *, float scale=0.5, int[] dims=[], str mode=\"x\") -> "
      "Tensor(a!)";
  std::string text, line;
  {
    auto library = std::make_unique<torch::Library>(torch::Library::DEF, "serialize_test",
                                                    std::nullopt, __FILE__, __LINE__);
    library->def(kSchema);
    library->impl("shift", [](torch::Tensor self, const std::optional<torch::Tensor>&, double,
                              c10::IntArrayRef, c10::string_view) { return self.add_(1); });
    GraphBuilder b;
    const Ref x = b.op("aten::relu", {b.input(torch::ones({2, 2}))});
    b.op("serialize_test::shift",
         {x, x, 0.25, c10::IValue(c10::List<int64_t>({0, 1})), c10::IValue("edge")});
    b.output(x);
    text = graph_to_json(b.graph());
    line = b.graph().line(1);
  }
  const c10::OperatorName name("serialize_test::shift", "");
  ASSERT_FALSE(c10::Dispatcher::singleton().findSchema(name).has_value());
  const Graph graph = saved_graph_from_json(text, "graph.json").graph;
  EXPECT_EQ(graph.line(1), line);
  EXPECT_EQ(partitioner::partition(graph, partitioner::PartitionOptions(1)).stages(), 1);
  EXPECT_EQ(graph_to_json(graph), text);
  EXPECT_EQ(saved_graph_from_json(text, "again.json").graph.line(1), line);
}

TEST(Serialize, ConstantsWithoutAJsonForm) {
  GraphBuilder b;
  b.op("aten::gelu", {b.input(torch::ones({2})), c10::IValue("tanh")});
  b.graph().operators[0].arguments[1].constant = c10::Dict<std::string, int64_t>();
  EXPECT_EQ(error_of<CaptureError>([&] { graph_to_json(b.graph()); }),
            "[smp] cannot save the graph: argument \"approximate\" of operator aten::gelu is of "
            "type GenericDict, which has no JSON form. Leave out the configuration parameter "
            "\"graph_file\".");
  // A number may change at every step: it is not needed to plan.
  GraphBuilder c;
  c.op("aten::mul.Scalar", {c.input(torch::ones({2})), 2.0});
  c.graph().operators[0].arguments[1].constant = c10::Dict<std::string, int64_t>();
  EXPECT_EQ(reloaded(c.graph()).to_string(), c.graph().to_string());
}

TEST(Serialize, NamesThatCannotBeShown) {
  const auto error = [](const std::string& scope, const std::string& parameter) {
    GraphBuilder b;
    b.scope = scope;
    b.output(b.op("aten::relu", {b.parameter(parameter, torch::ones({2}))}));
    return error_or_none<CaptureError>([&] { graph_to_json(b.graph()); });
  };
  EXPECT_EQ(error("\xc3\xa4", "weight"), "");
  for (const std::string& text : {error("a\nb", "weight"), error("", "a\nb")}) {
    EXPECT_EQ(text,
              "[smp] cannot save the graph: expected names of modules and parameters of at most "
              "2000 bytes of UTF-8 without control characters, got \"a\\nb\". Rename it, or "
              "leave out the configuration parameter \"graph_file\".");
  }
  EXPECT_NE(error("\xff", "weight").find("got \"\\xff\""), std::string::npos);
  EXPECT_NE(error(std::string(3000, '.'), "weight").find("(3000 bytes)"), std::string::npos);
  // A constant may be any text.
  GraphBuilder b;
  b.op("aten::mul.Scalar", {b.input(torch::ones({2})), 2.0});
  b.graph().operators[0].arguments[1].constant = "\xff";
  EXPECT_EQ(error_of<CaptureError>([&] {
              graph_to_json(b.graph());
            }).find("[smp] cannot save the graph: expected constants of text in UTF-8, got: "),
            0u);
}

class SerializeErrors : public ::testing::Test {
 protected:
  SerializeErrors() {
    GraphBuilder b;
    const Ref x = b.input(torch::ones({2, 3}));
    const Ref y = b.op("aten::mul.Scalar", {x, 2.0});
    b.output(b.op("aten::relu", {y}));
    text_ = graph_to_json(b.graph());
  }

  /// The error of the file with the first `from` replaced.
  std::string error_with(const std::string& from, const std::string& to) const {
    std::string changed = text_;
    const size_t at = changed.find(from);
    EXPECT_NE(at, std::string::npos) << from << " is not in\n" << text_;
    if (at != std::string::npos) changed.replace(at, from.size(), to);
    return error_or_none<ConfigError>([&] { saved_graph_from_json(changed, "g.json"); });
  }

  std::string text_;
};

TEST_F(SerializeErrors, NoGraph) {
  EXPECT_EQ(error_of<ConfigError>([] { load_graph("no/such.json"); }),
            "[smp] no/such.json: cannot read the saved graph: No such file or directory. Give the "
            "path of a JSON file.");
  GraphBuilder b;
  EXPECT_EQ(error_of<ConfigError>([&] { save_graph(b.graph(), "no/such.json"); }),
            "[smp] no/such.json: cannot write the graph: No such file or directory. Give a path in "
            "a folder that can be written.");
  EXPECT_EQ(
      error_of<ConfigError>([] { saved_graph_from_json(R"({"partitions": 2})", "smp.json"); }),
      "[smp] smp.json: this is not a saved graph: it has no \"format\": \"smp graph\". Give "
      "a file that was written for the configuration parameter \"graph_file\".");
  EXPECT_EQ(error_with("\"version\": 1", "\"version\": 7"),
            "[smp] g.json: \"version\": expected version 1 of saved graphs, got 7. Save the graph "
            "again (configuration parameter \"graph_file\").");
  EXPECT_EQ(error_of<ConfigError>([&] {
              saved_graph_from_json(text_.substr(0, text_.size() / 2), "g.json");
            }).find("[smp] g.json: malformed JSON at line "),
            0u);
}

TEST_F(SerializeErrors, NameThePath) {
  EXPECT_EQ(error_with("\"kind\":\"input\"", "\"kind\":\"output\""),
            "[smp] g.json: \"values[0].kind\": expected a kind of value such as \"parameter\", got "
            "\"output\".");
  EXPECT_EQ(error_with("\"Float\"", "\"float33\""),
            "[smp] g.json: \"values[0].dtype\": expected a dtype such as \"Float\", got "
            "\"float33\".");
  EXPECT_EQ(error_with("\"strides\":[3,1]", "\"strides\":[3]"),
            "[smp] g.json: \"values[0].strides\": expected one stride for each of the 2 sizes, got "
            "an array of 1.");
  EXPECT_EQ(error_with("\"device\":\"cpu\"", "\"device\":\"disk\""),
            "[smp] g.json: \"values[0].device\": expected a device such as \"cpu\", got "
            "\"disk\".");
  EXPECT_EQ(error_with("\"producer\":0", "\"producer\":2"),
            "[smp] g.json: \"values[1].producer\": expected an integer from -1 to 1, got 2.");
  EXPECT_EQ(error_with("{\"tensor\":0}", "{\"tensor\":9}"),
            "[smp] g.json: \"operators[0].arguments[0].tensor\": expected an integer from -1 to 2, "
            "got 9.");
  EXPECT_EQ(error_with("{\"tensor\":0}", "{\"tensor\":2}"),
            "[smp] g.json: \"operators[0].arguments\": value 2 is used before it is made. Save the "
            "graph again (configuration parameter \"graph_file\").");
  EXPECT_EQ(error_with("\"results\":[2]", "\"results\":[1]"),
            "[smp] g.json: \"operators[1].results\": value 1 names another producer. Save the "
            "graph again (configuration parameter \"graph_file\").");
  EXPECT_EQ(error_with("{\"constant\":2.0}", "{\"constant\":{\"double\":\"many\"}}"),
            "[smp] g.json: \"operators[0].arguments[1].constant.double\": expected \"inf\", "
            "\"-inf\" or \"nan\", got \"many\".");
  EXPECT_EQ(error_with(",{\"constant\":2.0}", ""),
            "[smp] g.json: \"operators[0].arguments\": operator aten::mul.Scalar has 2 arguments "
            "in this version of libtorch, got 1. Save the graph again (configuration parameter "
            "\"graph_file\").");
  EXPECT_EQ(error_with("\"forward_us\":0.0", "\"forward_us\":-1"),
            "[smp] g.json: \"operators[0].cost.forward_us\": expected a time in us that is not "
            "negative, got -1.");
  EXPECT_EQ(error_with("aten::relu(Tensor self)", "new::relu(Tensor self"),
            "[smp] g.json: \"schemas[1]\": expected the schema of an operator, got "
            "\"new::relu(Tensor self -> Tensor\".");
  EXPECT_EQ(error_with("aten::relu(", "aten("),
            "[smp] g.json: \"schemas[1]\": expected the schema of an operator, got "
            "\"aten(Tensor self) -> Tensor\".");
  EXPECT_EQ(
      error_with("\"sizes\":[2,3]", "\"sizes\":[4611686018427387904,4611686018427387904]"),
      "[smp] g.json: \"values[0].sizes\": expected the sizes of a tensor, got an array of 2.");
  EXPECT_EQ(
      error_with("\"Float\"", "\"UNKNOWN_SCALAR\""),
      "[smp] g.json: \"values[0].sizes\": expected the sizes of a tensor, got an array of 2.");
  // libtorch's parser would recur.
  const std::string brackets(100000, '(');
  EXPECT_EQ(error_with("aten::relu(Tensor self", "new::relu(" + brackets),
            "[smp] g.json: \"schemas[1]\": expected the schema of an operator, got \"new::relu(" +
                std::string(89, '(') + "... (100023 bytes).");
  EXPECT_EQ(error_with("\"scope\":\"\"", R"("scope":"a\u001b[2J")"),
            "[smp] g.json: \"operators[0].scope\": expected a name of at most 2000 bytes without "
            "control characters, got \"a\\u001b[2J\".");
  EXPECT_EQ(error_with("\"outputs\": [2]", "\"results\": [2]"),
            "[smp] g.json: expected an object with \"outputs\", got an object.");
}

TEST_F(SerializeErrors, ChangesOfTheGraphAreSeenCostsMayChange) {
  EXPECT_EQ(error_with("\"sizes\":[2,3]", "\"sizes\":[2,4]"),
            "[smp] g.json: \"fingerprint\": the graph is not the one that was saved: the file was "
            "changed in more than its costs, or written by another version of libtorch. Save the "
            "graph again (configuration parameter \"graph_file\").");
  EXPECT_EQ(error_with("\"forward_us\":0.0", "\"forward_us\":1.5"), "");
}

/// Whatever a file holds, it is read or refused.
TEST_F(SerializeErrors, DamagedFilesAreRefused) {
  std::mt19937 random(7);
  int refused = 0;
  for (int i = 0; i < 500; ++i) {
    std::string damaged = text_;
    const size_t at = random() % damaged.size();
    if (i % 2 == 0) {
      damaged[at] = "0123456789-\"[]{},x"[random() % 18];
    } else {
      damaged.erase(at, 1 + random() % 8);
    }
    try {
      saved_graph_from_json(damaged, "g.json");
    } catch (const ConfigError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 300);
}

/// Such a number does not decide the type of the product, as another tensor of its type would.
TEST(Serialize, WrappedNumbersComeBackAsSuch) {
  for (const at::Scalar& number :
       {at::Scalar(0.5), at::Scalar(3), at::Scalar(true), at::Scalar(c10::complex<double>(1, -2)),
        at::Scalar(std::numeric_limits<double>::infinity())}) {
    const auto graph = with_wrapped_number(number);
    const Graph again = reloaded(*graph);
    expect_equal_graphs(*graph, again);
    ASSERT_EQ(again.operators.size(), 1u);
    const Value& value = again.values[again.operators[0].arguments[1].values[0]];
    ASSERT_EQ(value.kind, ValueKind::kConstant);
    ASSERT_TRUE(value.content.defined());
    EXPECT_TRUE(at::equal(value.content, c10::scalar_to_tensor(number)));
    EXPECT_EQ(at::mul(torch::arange(4), value.content).scalar_type(),
              again.values[again.outputs[0]].meta.dtype);
  }
}

TEST(Serialize, FilesWithoutWrappedNumbersAreReadAndDamagedNumbersAreNot) {
  std::string text = graph_to_json(*with_wrapped_number(0.5));
  const std::string number = ",\"number\":0.5";
  const size_t place = text.find(number);
  ASSERT_NE(place, std::string::npos) << text;
  const auto with = [&](const std::string& other) {
    return std::string(text).replace(place, number.size(), other);
  };
  EXPECT_EQ(saved_graph_from_json(with(""), "g.json").graph.operators.size(), 1u);
  EXPECT_EQ(
      error_of<ConfigError>([&] { saved_graph_from_json(with(",\"number\":\"0.5\""), "g.json"); }),
      "[smp] g.json: \"values[1].number\": expected the number of a tensor of the CPU without "
      "dimensions, got \"0.5\".");
}

}  // namespace
}  // namespace smp::graph::testing
