// SPDX-License-Identifier: Apache-2.0
// Loaded programs as modules: names, modes, arguments and results.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
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

TEST(ExportedModule, OneProgramForEvaluation) {
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

TEST(ExportedModule, NamesAreThoseOfPython) {
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

TEST(ExportedModule, StructuresOfResults) {
  ExportedModule model = load_exported(archive("shapes"));
  const Tensor x = torch::ones({6, 4});
  c10::Dict<std::string, Tensor> named;
  named.insert("k", x);
  const c10::IValue result = model(x, std::make_tuple(x, x), named, 3, x);
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

TEST(ExportedModule, RefusesOtherArguments) {
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
TEST(ExportedModule, RefusesOtherNumbers) {
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
