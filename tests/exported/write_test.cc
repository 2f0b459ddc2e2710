// SPDX-License-Identifier: Apache-2.0
// Programs that C++ writes: their form, and what is refused.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "graph/default_dtype.h"
#include "graph/tracer.h"
#include "smp/error.h"
#include "smp/export_program.h"
#include "smp/exported.h"
#include "smp/leaf.h"
#include "smp/smp.h"
#include "tests/error_of.h"
#include "tests/exported/archives.h"
#include "tests/exported/written.h"

namespace smp::testing {
namespace {

using torch::Tensor;

TORCH_LIBRARY(export_test, library) {
  library.def("twice(Tensor x) -> Tensor", [](const Tensor& x) { return x * 2; });
}

class ExportProgram : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::set_num_threads(1);
    torch::manual_seed(1);
  }

  std::string path() const { return folder_.file("model.pt2"); }
  nlohmann::json json(const std::string& record = "models/model.json") const {
    return nlohmann::json::parse(records_of(path()).at(record));
  }

  TempFolder folder_;
};

struct LayerImpl : torch::nn::Module {
  LayerImpl() { linear = register_module("linear", torch::nn::Linear(4, 4)); }
  Tensor forward(Tensor x) { return torch::relu(linear(x)); }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Layer);

/// Writes a program whose whole is `forward`, a function of one tensor.
template <class Forward>
ExportedParts write(const std::string& path, const Forward& forward,
                    const ExportProgramOptions& options = {}) {
  Layer layer;
  return export_program(
      path, *layer, [&](Tensor x) { return forward(layer->linear, x); },
      std::make_tuple(torch::randn({6, 4})), options);
}

template <class E, class Forward>
std::string refusal(const std::string& path, const Forward& forward,
                    const ExportProgramOptions& options = {}) {
  return error_of<E>([&] { write(path, forward, options); });
}

ExportProgramOptions dynamic_batch() {
  return ExportProgramOptions().dynamic_shapes({{{0, ExportDim("batch")}}});
}

/// Regions, tied weights, constants that are written, structures, and two dynamic sizes.
struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    conv = register_module("conv", torch::nn::Conv1d(torch::nn::Conv1dOptions(4, 4, 3).padding(1)));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    in = register_module("in", torch::nn::Linear(4, 4));
    tied = register_parameter("tied", in->weight);
    seen = register_buffer("seen", torch::zeros({4}));
  }

  std::tuple<Tensor, std::vector<Tensor>, std::map<std::string, Tensor>> forward(
      Tensor x, std::map<std::string, Tensor> more, double scale) {
    auto h = norm(conv(x)).transpose(1, 2).reshape({x.size(0) * x.size(2), 4});
    {
      torch::NoGradGuard no_grad;
      seen.mul_(0.5).add_(in(h).mean(0));
    }
    Tensor cast;
    {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      cast = in(h) + torch::nn::functional::linear(h, tied);
      at::autocast::set_autocast_enabled(at::kCPU, false);
      at::autocast::clear_cache();
    }
    const std::vector<float> numbers{1, 2, 3, 4};
    const auto table = torch::tensor(numbers);
    auto written = torch::tensor(numbers);
    written.mul_(2);
    const auto parts = (h * table).split(2, 1);
    return {cast * written * scale,
            {parts[0], torch::full({x.size(0), 2}, 0.5)},
            {{"later", more.at("b") + more.at("a")}}};
  }

  torch::nn::Conv1d conv{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear in{nullptr};
  Tensor tied, seen;
};
TORCH_MODULE(Mixed);

std::tuple<Tensor, std::map<std::string, Tensor>, double> arguments_of_mixed(int64_t batch,
                                                                             int64_t time) {
  return {
      torch::randn({batch, 4, time}), {{"a", torch::randn({3})}, {"b", torch::randn({3})}}, 0.5};
}

TEST_F(ExportProgram, LoadedBackComputesTheSame) {
  Mixed net;
  const auto first = arguments_of_mixed(3, 5);
  const WrittenFolder folder;
  const std::string file = folder.file("Mixed.pt2");
  const ExportDim batch("batch"), time("time");
  const ExportedParts parts = export_program(file, net, first,
                                             ExportProgramOptions()
                                                 .dynamic_shapes({{{0, batch}, {2, time}}})
                                                 .argument_names({"x", "more", "scale"}));
  EXPECT_EQ(parts.renamed.at("in.weight"), "in_.weight");
  ExportedModule loaded = load_exported(file);
  int number = 0;
  for (const auto& [b, t] : std::vector<std::pair<int64_t, int64_t>>{{3, 5}, {2, 7}, {6, 1}}) {
    const auto arguments = number == 0 ? first : arguments_of_mixed(b, t);
    const auto& [x, more, scale] = arguments;
    const std::vector<c10::IValue> values{x, detail::as_ivalue(more), scale};
    const auto forward = [&, x = x, more = more, scale = scale] {
      return detail::as_ivalue(net->forward(x, more, scale));
    };
    const RunTensors expected = run_of(*net, forward, parts.renamed);
    expect_same_run(run_of(*loaded, [&] { return loaded->call(values); }), expected,
                    "batch " + std::to_string(b));
    keep_run(folder, "Mixed", number++, tensors_of(values), expected);
  }
}

TEST_F(ExportProgram, FormIsThatOfPythonsTrainingExport) {
  const Mixed net;
  const ExportedParts parts = export_program(path(), net, arguments_of_mixed(3, 5));
  const nlohmann::json program = json();
  EXPECT_EQ(program.at("schema_version").at("major"), 8);
  EXPECT_EQ(program.at("verifiers"), nlohmann::json::array({"TRAINING"}));
  // Tied weights are two names of one record.
  const auto weights = json("data/weights/model_weights_config.json").at("config");
  EXPECT_EQ(weights.at("tied").at("path_name"), weights.at("in_.weight").at("path_name"));
  std::set<std::string> records;
  for (const auto& entry : weights) records.insert(entry.at("path_name").get<std::string>());
  EXPECT_EQ(records.size() + 1, weights.size());
  // Buffers are written in place, so that all outputs are results.
  for (const auto& spec : program.at("graph_module").at("signature").at("output_specs")) {
    EXPECT_TRUE(spec.contains("user_output"));
  }
  std::set<std::string> targets;
  for (const auto& node : program.at("graph_module").at("graph").at("nodes")) {
    targets.insert(node.at("target").get<std::string>());
  }
  for (const char* target :
       {"torch.ops.aten.batch_norm.default", "torch.ops.higher_order.wrap_with_autocast",
        "torch.ops.higher_order.wrap_with_set_grad_enabled", "torch.ops.aten.clone.default"}) {
    EXPECT_EQ(targets.count(target), 1u) << target;
  }
  // Default types are said.
  EXPECT_NE(program.dump().find("\"as_scalar_type\":7},\"kind\":2,\"name\":\"dtype\""),
            std::string::npos);
  EXPECT_NE(program.dump().find("L__self___conv,conv,torch.nn.Conv1dImpl"), std::string::npos);
  for (const auto& [record, content] : records_of(path())) {
    EXPECT_EQ(content.find("stack_trace"), std::string::npos) << record;
    EXPECT_EQ(content.find(folder_.path()), std::string::npos) << record;
  }
  EXPECT_EQ(parts.constants,
            (std::vector<std::string>{"lifted_tensor_0 f32[4]", "lifted_tensor_1 f32[4]"}));
  EXPECT_EQ(std::count(parts.numbers.begin(), parts.numbers.end(),
                       "norm: aten::batch_norm(momentum=0.1)"),
            1);
  EXPECT_GT(parts.operators, 15u);
}

TEST_F(ExportProgram, TrainsOnAsTheModel) {
  Layer net;
  const auto x = torch::randn({6, 4}), y = torch::randn({6, 4});
  export_program(path(), net, std::make_tuple(x));
  ExportedModule loaded = load_exported(path());
  torch::optim::SGD first(net->parameters(), 0.1), second(loaded->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    first.zero_grad();
    second.zero_grad();
    torch::mse_loss(net->forward(x), y).backward();
    torch::mse_loss(loaded(x).toTensor(), y).backward();
    first.step();
    second.step();
  }
  for (const auto& item : net->named_parameters()) {
    EXPECT_TRUE(torch::equal(item.value(), loaded->named_parameters()[item.key()])) << item.key();
  }
}

/// "casts" has a region of autocast that casts a parameter twice, and does not keep its casts.
TEST_F(ExportProgram, LoadedProgramsAreWrittenAgain) {
  const auto input_of = [](const std::string& name, int64_t batch) {
    return name == "zoo" ? torch::randint(20, {batch, 6}) : torch::randn({batch, 4});
  };
  for (const char* name : {"zoo", "casts"}) {
    SCOPED_TRACE(name);
    ExportedModule first = load_exported(archive(name));
    export_program(path(), first, std::make_tuple(input_of(name, 4)), dynamic_batch());
    ExportedModule second = load_exported(path());
    for (const int64_t batch : {4, 6}) {
      const Tensor input = input_of(name, batch);
      const RunTensors expected = run_of(*first, [&] { return first(input); });
      expect_same_run(run_of(*second, [&] { return second(input); }), expected, name);
    }
    for (const auto& module : first->named_modules()) {
      EXPECT_TRUE(second->named_modules().contains(module.key())) << module.key();
    }
  }
}

TEST_F(ExportProgram, PartsForTheBackwardAreLeftOut) {
  Layer layer;
  const auto step = [&](Tensor x) {
    const auto y = layer->linear(x);
    const auto loss = torch::nn::functional::softplus(y).mean();
    graph::Tracer::current()->backward({loss}, {});
    return y.abs();
  };
  export_program(path(), *layer, step, std::make_tuple(torch::randn({6, 4})));
  EXPECT_EQ(json().dump().find("softplus"), std::string::npos);
  EXPECT_NE(json().dump().find("aten.abs"), std::string::npos);
}

/// The body of a step is written as it is, and Python runs its forward.
TEST_F(ExportProgram, BodiesOfStepsAreWritten) {
  const WrittenFolder folder;
  const std::string file = folder.file("Step.pt2");
  const ExportDim batch("batch");
  run_as_threads(1, Config().microbatches(2), [&] {
    torch::set_num_threads(1);
    Layer net;
    DistributedModel<Layer> model(net);
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.1);
    const auto body = [&](Tensor x, Tensor y) {
      const Tensor logits = model(x);
      const Tensor loss = torch::mse_loss(logits, y);
      model->backward(loss);
      return std::make_tuple(loss, logits);
    };
    auto train = step(body);
    const auto x = torch::randn({6, 4}), y = torch::randn({6, 4});
    train(x, y);
    optimizer.step();
    export_program(file, *net, body, std::make_tuple(x, y),
                   ExportProgramOptions().dynamic_shapes({{{0, batch}}, {{0, batch}}}));
    ExportedModule loaded = load_exported(file);
    int number = 0;
    for (const int size : {6, 2, 5}) {
      const auto inputs = x.narrow(0, 0, size), targets = y.narrow(0, 0, size);
      const RunTensors expected = run_of(*net, [&] {
        const Tensor logits = net->forward(inputs);
        return detail::as_ivalue(std::make_tuple(torch::mse_loss(logits, targets), logits));
      });
      expect_same_run(run_of(*loaded, [&] { return loaded(inputs, targets); }), expected,
                      "batch " + std::to_string(size));
      keep_run(folder, "Step", number++, {inputs, targets}, expected);
    }
  });
}

/// A tensor in place of a number would decide the type of a product with integers.
TEST_F(ExportProgram, NumbersWrappedIntoTensorsStayNumbers) {
  const Tensor half = c10::scalar_to_tensor(0.5);
  half.unsafeGetTensorImpl()->set_wrapped_number(true);
  Layer layer;
  const auto body = [&](Tensor x) {
    return layer->forward(x) + at::mul((x > 0).to(torch::kLong), half);
  };
  const WrittenFolder folder;
  const std::string file = folder.file("Wrapped.pt2");
  const auto x = torch::randn({6, 4});
  const ExportedParts parts = export_program(file, *layer, body, std::make_tuple(x));
  EXPECT_EQ(parts.numbers,
            (std::vector<std::string>{"aten::gt.Scalar(other=0)", "aten::mul.Tensor(other=0.5)"}));
  EXPECT_TRUE(parts.constants.empty());
  ExportedModule loaded = load_exported(file);
  const RunTensors expected = run_of(*layer, [&] { return detail::as_ivalue(body(x)); });
  EXPECT_EQ(expected.at("output.0").scalar_type(), torch::kFloat);
  const RunTensors got = run_of(*loaded, [&] { return loaded(x); });
  EXPECT_EQ(got.at("output.0").scalar_type(), torch::kFloat);
  expect_same_run(got, expected, "loaded");
  keep_run(folder, "Wrapped", 0, {x}, expected);
  expect_has(refusal<CaptureError>(
                 path(), [&](auto&, Tensor x) { return torch::where(x > 0, (x > 1) * 1, half); }),
             {"cannot export \"" + path(), "operator aten::where.self",
              "takes a number that is wrapped into a tensor and decides no type, which Python has "
              "in sums, differences, products and quotients only. Pass a number, or a tensor "
              "(torch::tensor(number))"});
}

TEST_F(ExportProgram, OperatorsThatPythonLacksAreRefused) {
  expect_has(
      refusal<CaptureError>(path(), [](auto& layer, Tensor x) { return smp::leaf(layer)(x); }),
      {"cannot export \"" + path(), "smp::leaf",
       "is leaf module \"torch::nn::LinearImpl\", whose operators are not known"});
  expect_has(refusal<CaptureError>(path(),
                                   [](auto& layer, Tensor x) {
                                     const auto y = layer(x);
                                     return torch::autograd::grad({y.sum()}, {layer->weight})[0];
                                   }),
             {"is torch::autograd::grad, and an exported program has no backward pass in it"});
  expect_has(refusal<CaptureError>(path(),
                                   [](auto& layer, Tensor x) {
                                     x.requires_grad_();
                                     return layer(x);
                                   }),
             {"changes whether a tensor requires a gradient, which no operator does in Python"});
  expect_has(refusal<CaptureError>(path(),
                                   [](auto& layer, Tensor x) {
                                     static const auto twice =
                                         c10::Dispatcher::singleton()
                                             .findSchemaOrThrow("export_test::twice", "")
                                             .typed<Tensor(const Tensor&)>();
                                     return twice.call(layer(x));
                                   }),
             {"operator export_test::twice", "is none of libtorch's, so Python does not have it"});
  expect_has(
      refusal<CaptureError>(path(),
                            [](auto& layer, Tensor x) {
                              auto y = layer(x);
                              graph::Tracer::current()->backward({y.sum()}, {});
                              return y.detach().clone().mul_(2);
                            }),
      {"aten::mul_", "writes memory after backward, and an exported program has no backward"});
  expect_has(
      refusal<CaptureError>(path(),
                            [](auto& layer, Tensor x) {
                              const graph::DefaultDtypeScope scope(at::kDouble);
                              return layer(x) + x.gt(0).to(torch::kLong).div(3).to(torch::kFloat);
                            }),
      {"makes floating point numbers of integers, in the default type, which is Double here"});
}

TEST_F(ExportProgram, ProgramsThatChangeWithASizeAreRefused) {
  const auto error = [&](const auto& forward) {
    return refusal<CaptureError>(path(), forward, dynamic_batch());
  };
  expect_has(error([](auto& layer, Tensor x) {
               auto y = layer(x);
               for (int64_t i = 0; i < x.size(0); ++i) y = y + 1;
               return y;
             }),
             {"it calls other operators for other dynamic sizes: for (6)"});
  expect_has(error([](auto& layer, Tensor x) {
               return layer(x) * torch::tensor(std::vector<float>{float(x.size(0))});
             }),
             {"makes from numbers of its own (torch::tensor) has other content for other dynamic"});
  expect_has(error([](auto& layer, Tensor x) { return layer(x) * (1.0 / double(x.size(0))); }),
             {"argument \"other\" that differs with the dynamic sizes, and is no size"});
  expect_has(error([](auto& layer, Tensor x) {
               return layer(x).view({x.size(0) / 2, 8});
             }),
             {"is 3 for dynamic sizes (6) and", "which is no sum of products of them"});
}

TEST_F(ExportProgram, SizesMayBeProductsAndSums) {
  const auto parts = write(
      path(),
      [](auto& layer, Tensor x) {
        const auto pairs = torch::bmm(x.unsqueeze(1).expand({-1, x.size(0), 4}),
                                      x.t().unsqueeze(0).expand({x.size(0), 4, -1}));
        return torch::cat({pairs.reshape({x.size(0) * x.size(0), x.size(0)}),
                           torch::zeros({2 * x.size(0) + 1, x.size(0)})})
                   .sum() +
               layer(x);
      },
      dynamic_batch());
  EXPECT_GT(parts.operators, 0u);
  ExportedModule loaded = load_exported(path());
  for (int64_t batch : {2, 5, 11}) {
    EXPECT_EQ(loaded(torch::randn({batch, 4})).toTensor().size(0), batch);
  }
}

TEST_F(ExportProgram, ArgumentsAndOptionsAreChecked) {
  const auto forward = [](auto& layer, Tensor x) { return layer(x); };
  const auto error = [&](const ExportProgramOptions& options) {
    return refusal<UsageError>(path(), forward, options);
  };
  const ExportDim batch("batch");
  expect_has(error(ExportProgramOptions().dynamic_shapes({{}, {{0, batch}}})),
             {"dynamic_shapes is given for 2 tensors, and there are 1"});
  expect_has(error(ExportProgramOptions().dynamic_shapes({{{2, batch}}})),
             {"dynamic_shapes has axis 2 of a tensor of shape [6, 4]. Count axes from 0"});
  expect_has(error(ExportProgramOptions().dynamic_shapes({{{0, ExportDim("batch").max(5)}}})),
             {"dynamic size \"batch\" is 6 in the inputs, and may be 1 to 5"});
  expect_has(error(ExportProgramOptions().dynamic_shapes({{{0, batch}, {1, batch}}})),
             {"dynamic size \"batch\" is 6 in one tensor and 4 in another"});
  expect_has(error(ExportProgramOptions().argument_names({"a-b"})),
             {"argument_names has 1 names for 1 arguments, or one that Python does not take"});
  Layer layer;
  expect_has(
      error_of<UsageError>([&] {
        export_program(path(), layer, std::make_tuple(torch::randn({4, 6}).t()), dynamic_batch());
      }),
      {"a tensor with a dynamic size is a view with strides [1, 6]"});
  const auto many = torch::randn({2, 2, 2, 2});
  ExportProgramOptions four;
  four.dynamic_shapes(
      {{{0, ExportDim("a")}, {1, ExportDim("b")}, {2, ExportDim("c")}, {3, ExportDim("d")}}});
  expect_has(error_of<UsageError>([&] {
               export_program(
                   path(), *layer, [](Tensor x) { return x + 1; }, std::make_tuple(many), four);
             }),
             {"there are 4 dynamic sizes, and there may be 3"});
  expect_has(refusal<UsageError>(path(),
                                 [&](auto& inner, Tensor x) {
                                   export_program(
                                       path(), *inner, [](Tensor y) { return y; },
                                       std::make_tuple(x));
                                   return x;
                                 }),
             {"smp::export_program was called inside a step function"});
}

TEST_F(ExportProgram, ModelsMustHaveTheirData) {
  auto meta = std::make_shared<torch::nn::Module>("Meta");
  meta->register_parameter("weight", torch::ones({1}, torch::kMeta));
  expect_has(error_of<UsageError>([&] {
               export_program(
                   path(), *meta, [](Tensor x) { return x + 1; },
                   std::make_tuple(torch::ones({2})));
             }),
             {"\"weight\" is on the meta device. Export a module that this process has whole"});
  auto two = std::make_shared<torch::nn::Module>("Two");
  two->register_parameter("in", torch::ones({1}));
  two->register_parameter("in_", torch::ones({1}));
  expect_has(error_of<UsageError>([&] {
               export_program(
                   path(), *two, [](Tensor x) { return x + 1; }, std::make_tuple(torch::ones({2})));
             }),
             {"two parameters or buffers would be \"in_\" in Python, where a name"});
  auto bits = std::make_shared<torch::nn::Module>("Bits");
  bits->register_buffer("bits", torch::empty({2}, at::kBits8));
  expect_has(error_of<CaptureError>([&] {
               export_program(
                   path(), *bits, [](Tensor x) { return x + 1; },
                   std::make_tuple(torch::ones({2})));
             }),
             {"exported programs have no tensors of type Bits8"});
  expect_has(error_of<UsageError>([&] {
               export_program(
                   path(), *two, [](Tensor x) { return std::make_tuple(x, std::string("name")); },
                   std::make_tuple(torch::ones({2})));
             }),
             {"a result is or holds a value of type String, which exported programs do not take"});
  c10::impl::GenericDict keys(c10::FloatType::get(), c10::TensorType::get());
  keys.insert(0.5, torch::ones({2}));
  expect_has(error_of<UsageError>([&] {
               export_program(
                   path(), *two, [](const c10::IValue&) { return torch::ones({1}); },
                   std::make_tuple(c10::IValue(keys)));
             }),
             {"a dictionary of an exported program has a key of type Double"});
}

}  // namespace
}  // namespace smp::testing
