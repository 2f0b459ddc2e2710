// SPDX-License-Identifier: Apache-2.0
// Loaded programs in plain libtorch, against the results of Python's modules of them.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "smp/error.h"
#include "smp/exported.h"
#include "tests/error_of.h"
#include "tests/exported/archives.h"

namespace smp::testing {
namespace {

using torch::Tensor;

class ExportedTraining : public ::testing::Test {
 protected:
  void SetUp() override { torch::set_num_threads(1); }
};

Tensor loss_of(const c10::IValue& result) {
  const Tensor output = result.isTensor()
                            ? result.toTensor()
                            : result.toGenericDict().at("out").toListRef()[0].toTensor();
  return (output * output).mean();
}

using Call = std::function<c10::IValue(ExportedModule&, const std::vector<Tensor>&)>;

c10::IValue call_with_one(ExportedModule& model, const std::vector<Tensor>& inputs) {
  return model(inputs.at(0));
}

c10::IValue call_with_shapes(ExportedModule& model, const std::vector<Tensor>& inputs) {
  c10::Dict<std::string, Tensor> named;
  named.insert("k", inputs.at(3));
  return model(inputs.at(0), std::make_tuple(inputs.at(1), inputs.at(2)), named, 3,
               ExportedModuleImpl::Named{{"mask", inputs.at(4)}});
}

void expect_equal(const Tensor& got, const Tensor& expected, const std::string& what) {
  ASSERT_TRUE(got.defined()) << what;
  EXPECT_TRUE(torch::equal(got, expected))
      << what << ": largest difference " << (got - expected).abs().max().item<double>();
}

c10::IValue call_with_numbers(ExportedModule& model, const std::vector<Tensor>& inputs) {
  const int64_t rows = inputs.at(0).size(0);
  return model(inputs.at(0), rows, rows - 1, 2.5);
}

c10::IValue call_with_states(ExportedModule& model, const std::vector<Tensor>& inputs) {
  c10::Dict<std::string, Tensor> states;
  states.insert("sum", inputs.at(1));
  states.insert("count", inputs.at(2));
  return model(inputs.at(0), states);
}

/// Three steps of SGD, each compared with Python's of the program `name`; `file` if another holds
/// the same.
void train_like_python(const std::string& name, const Call& call, const std::string& file = "") {
  const Expected expected(name);
  ExportedModule model = load_exported(archive(file.empty() ? name : file));
  for (int step = 0; step < 3; ++step) {
    const std::string prefix = std::to_string(step) + ".";
    torch::manual_seed(100 + step);
    model->zero_grad();
    const std::vector<Tensor> inputs = expected.inputs(step);
    const Tensor loss = loss_of(call(model, inputs));
    for (size_t i = 0; i < inputs.size(); ++i) {
      const std::string key = prefix + "written." + std::to_string(i);
      const std::string before = prefix + "input." + std::to_string(i);
      expect_equal(inputs[i], expected.at(expected.has(key) ? key : before), key);
    }
    loss.backward();
    expect_equal(loss.detach(), expected.at(prefix + "loss"), "loss " + prefix);
    torch::NoGradGuard no_grad;
    std::set<torch::TensorImpl*> updated;
    for (const auto& item : model->named_parameters()) {
      const std::string key = prefix + "gradient." + item.key();
      if (expected.has(key)) expect_equal(item.value().grad(), expected.at(key), key);
      if (!item.value().grad().defined()) continue;
      if (!updated.insert(item.value().unsafeGetTensorImpl()).second) continue;
      item.value().add_(item.value().grad(), -0.1);
    }
  }
  std::map<std::string, Tensor> values;
  for (const auto& item : model->named_parameters()) values[item.key()] = item.value();
  for (const auto& item : model->named_buffers()) values[item.key()] = item.value();
  for (const std::string& key : expected.names()) {
    if (key.rfind("value.", 0) != 0) continue;
    ASSERT_EQ(values.count(key.substr(6)), 1u) << key;
    expect_equal(values.at(key.substr(6)).detach(), expected.at(key), key);
  }
}

TEST_F(ExportedTraining, LayersWithStateAndRandomNumbers) {
  train_like_python("zoo", call_with_one);
}
TEST_F(ExportedTraining, RegionsAndConstants) { train_like_python("modes", call_with_one); }
TEST_F(ExportedTraining, StructuresSizesAndWrittenBuffers) {
  train_like_python("shapes", call_with_shapes);
}
TEST_F(ExportedTraining, FunctionalPrograms) { train_like_python("shapes_core", call_with_shapes); }
TEST_F(ExportedTraining, WrittenInputs) { train_like_python("writes", call_with_states); }
TEST_F(ExportedTraining, WrittenInputsOfFunctionalPrograms) {
  train_like_python("writes_core", call_with_states);
}
TEST_F(ExportedTraining, IntegersThatDiffer) { train_like_python("numbers", call_with_numbers); }
TEST_F(ExportedTraining, RegionsOfAutocast) { train_like_python("casts", call_with_one); }

TEST_F(ExportedTraining, ArchivesOfOtherVersionsOfTorch) {
  for (const char* file : {"torch_2_9", "torch_2_10", "torch_2_12", "torch_2_15"}) {
    SCOPED_TRACE(file);
    train_like_python("zoo", call_with_one, file);
  }
}

TEST_F(ExportedTraining, TwoProgramsAreTwoModes) {
  const Expected expected("zoo_eval");
  ExportedModule model =
      load_exported(ExportedPrograms().train(archive("zoo")).eval(archive("zoo_eval")));
  EXPECT_TRUE(model->is_training());
  model->eval();
  torch::NoGradGuard no_grad;
  for (int step = 0; step < 3; ++step) {
    expect_equal(loss_of(model(expected.inputs(step).at(0))),
                 expected.at(std::to_string(step) + ".loss"), "loss");
  }
  // Both have the same parameters.
  model->named_parameters()["head.weight"].zero_();
  EXPECT_EQ(loss_of(model(expected.inputs(0).at(0))).item<float>(), 0);
  model->train();
  EXPECT_EQ(loss_of(model(expected.inputs(0).at(0))).item<float>(), 0);
}

TEST_F(ExportedTraining, OneProgramForEvaluation) {
  ExportedModule model = load_exported(ExportedPrograms().eval(archive("zoo_eval")));
  EXPECT_FALSE(model->is_training());
  EXPECT_TRUE(model->named_modules()["drop"] != nullptr);
  expect_has(error_of<UsageError>([&] { model->train(); }),
             {"zoo_eval.pt2\" was loaded without one for train(), and a program has one mode",
              "smp::load_exported(smp::ExportedPrograms()"});
  ExportedModule both =
      load_exported(ExportedPrograms().train(archive("small")).eval(archive("small")));
  both->eval();
  EXPECT_EQ(both(torch::ones({4, 3})).toTensor().sizes(), (std::vector<int64_t>{4, 2}));
}

TEST_F(ExportedTraining, NamesAreThoseOfPython) {
  ExportedModule model = load_exported(archive("zoo"));
  std::set<std::string> parameters, buffers;
  for (const auto& item : model->named_parameters()) parameters.insert(item.key());
  for (const auto& item : model->named_buffers()) buffers.insert(item.key());
  EXPECT_EQ(parameters,
            (std::set<std::string>{"att.in_proj_bias", "att.in_proj_weight", "att.out_proj.bias",
                                   "att.out_proj.weight", "bn.bias", "bn.weight", "conv.bias",
                                   "conv.weight", "emb.weight", "head.weight", "lstm.bias_hh_l0",
                                   "lstm.bias_ih_l0", "lstm.weight_hh_l0", "lstm.weight_ih_l0"}));
  EXPECT_EQ(buffers, (std::set<std::string>{"bn.num_batches_tracked", "bn.running_mean",
                                            "bn.running_var", "scale", "seen"}));
  EXPECT_TRUE(
      model->named_parameters()["emb.weight"].is_same(model->named_parameters()["head.weight"]));
  EXPECT_TRUE(model->named_parameters()["emb.weight"].requires_grad());
  std::ostringstream text;
  text << *model;
  EXPECT_NE(text.str().find("smp::ExportedModule(\"tests/exported/archives/zoo.pt2\", nodes="),
            std::string::npos)
      << text.str();
}

TEST_F(ExportedTraining, StructuresOfResults) {
  const Expected expected("shapes");
  ExportedModule model = load_exported(archive("shapes"));
  const c10::IValue result = call_with_shapes(model, expected.inputs(0));
  const auto dictionary = result.toGenericDict();
  EXPECT_EQ(dictionary.at("rows").toInt(), 6);
  EXPECT_TRUE(dictionary.at("none").isNone());
  const auto inner = dictionary.at("out").toListRef()[1].toTupleRef().elements();
  EXPECT_EQ(inner[0].toTensor().sizes(), (std::vector<int64_t>{6, 2}));
  EXPECT_EQ(inner[1].toTensor().dim(), 0);
}

/// The error of `call` of the program "shapes" with arguments of its own.
std::string refused(const std::function<c10::IValue(ExportedModule&)>& call) {
  ExportedModule model = load_exported(archive("shapes"));
  return error_of<UsageError>([&] { call(model); });
}

TEST_F(ExportedTraining, RefusesOtherArguments) {
  const Tensor x = torch::ones({6, 4});
  const auto pair = std::make_tuple(x, x);
  c10::Dict<std::string, Tensor> named;
  named.insert("k", x);
  using Named = ExportedModuleImpl::Named;
  expect_has(
      refused([&](ExportedModule& m) { return m(x, pair, named, 3, x, x, x); }),
      {"shapes.pt2\" takes 5 arguments (x, pair, named, count, mask), got 7. Pass those that "
       "it was exported with"});
  expect_has(refused([&](ExportedModule& m) { return m(x, pair, named, 3); }),
             {"and not all of these were passed. Pass each"});
  expect_has(refused([&](ExportedModule& m) {
               return m(x, pair, named, 3, Named{{"maks", x}});
             }),
             {"has no argument \"maks\": it takes (x, pair, named, count, mask)"});
  expect_has(refused([&](ExportedModule& m) {
               return m(x, pair, named, 3, Named{{"x", x}});
             }),
             {"got its argument \"x\" twice. Pass it by position or by name"});
  expect_has(refused([&](ExportedModule& m) { return m(x, x, named, 3, x); }),
             {"argument pair of an exported program: expected a tuple of 2, got a value of type "
              "Tensor"});
  expect_has(refused([&](ExportedModule& m) { return m(x, pair, named, 4, x); }),
             {"argument count is 4, and the program was exported with 3, which is part of it"});
  expect_has(refused([&](ExportedModule& m) { return m(x.to(torch::kLong), pair, named, 3, x); }),
             {"argument x: expected a tensor Float [2*", ", 4], got Long [6, 4]"});
  expect_has(refused([&](ExportedModule& m) {
               return m(torch::ones({6, 5}), pair, named, 3, x);
             }),
             {"argument x has size 5 on axis 1, expected 4",
              "Only sizes that the export declared in dynamic_shapes may differ"});
  expect_has(refused([&](ExportedModule& m) {
               return m(x, pair, named, 3, torch::ones({8, 4}));
             }),
             {"has size 8 on axis 0, expected 2*", ", which is 6 here"});
  const Tensor two = torch::ones({2, 4});
  c10::Dict<std::string, Tensor> small;
  small.insert("k", two);
  expect_has(
      refused([&](ExportedModule& m) { return m(two, std::make_tuple(two, two), small, 3, two); }),
      {"is 1 for these arguments, and it was exported for 2 to 100",
       "Pass a batch in that range, or export with another"});
}

/// Integers are held against the sizes that they stand for, and against their range.
TEST_F(ExportedTraining, RefusesOtherNumbers) {
  ExportedModule model = load_exported(archive("numbers"));
  const Tensor x = torch::ones({4, 4});
  const auto said = [&](const c10::IValue& rows, const c10::IValue& factor,
                        const c10::IValue& scale = 2.5) {
    return error_of<UsageError>([&] { model(x, rows, factor, scale); });
  };
  EXPECT_EQ(model(x, 4, 3, 2.5).toTensor().size(0), 4);
  expect_has(said(2, 3), {"numbers.pt2\": argument rows is 2, expected s", ", which is 4 here",
                          "Only sizes that the export declared in dynamic_shapes may differ"});
  expect_has(said(4, 10), {" is 10 for these arguments, and it was exported for 0 to 9. Pass"});
  expect_has(said(4, -1), {" is -1 for these arguments, and it was exported for 0 to 9. Pass"});
  for (const c10::IValue& number : {c10::IValue(2.5), c10::IValue(true), c10::IValue()}) {
    expect_has(said(4, number),
               {"argument factor: expected a number, integer, got a value of type "});
  }
  expect_has(said(4, 3, 2),
             {"argument scale is 2, and the program was exported with 2.5, which is part of it"});
  const Tensor one = torch::ones({1, 4});
  expect_has(error_of<UsageError>([&] { model(one, 1, 3, 2.5); }),
             {" is 1 for these arguments, and it was exported for 2 and more. Pass"});
}

}  // namespace
}  // namespace smp::testing
