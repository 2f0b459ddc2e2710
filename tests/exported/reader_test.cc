// SPDX-License-Identifier: Apache-2.0
// Archives that are damaged, hostile, or use parts that cannot be loaded: an error each, which
// names the file, the place and a remedy.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <tuple>
#include <vector>

#include "core/text.h"
#include "exported/linear_size.h"
#include "exported/loaded_program.h"
#include "smp/error.h"
#include "smp/exported.h"
#include "tests/error_of.h"
#include "tests/exported/archives.h"

namespace smp::testing {
namespace {

using nlohmann::json;

const char* const kWeights = "data/weights/model_weights_config.json";

class ExportedReader : public ::testing::Test {
 protected:
  void SetUp() override { torch::set_num_threads(1); }

  /// The error of loading the small archive with another record.
  std::string refused(const Edit& edit, const std::string& record = "models/model.json") {
    const std::string path = edited(folder_, edit, record);
    return checked(error_of<CheckpointError>([&] { load_exported(path); }));
  }

  /// The error of loading these bytes.
  std::string refused_bytes(const std::string& bytes) {
    const std::string path = folder_.write("bytes.pt2", bytes);
    return checked(error_of<CheckpointError>([&] { load_exported(path); }));
  }

  /// The error of running the small archive with another program.
  template <class E>
  std::string refused_run(const Edit& edit) {
    ExportedModule model = load_exported(edited(folder_, edit));
    return checked(error_of<E>([&] { model(torch::ones({4, 3})); }));
  }

  static std::string checked(const std::string& text) {
    EXPECT_EQ(core::printable_lines(text), text);
    EXPECT_LT(text.size(), 2000u) << text;
    EXPECT_NE(text.find("exported program"), std::string::npos) << text;
    return text;
  }

  TempFolder folder_;
};

json& graph(json& program) { return program["graph_module"]["graph"]; }
json& node(json& program, int index) { return graph(program)["nodes"][index]; }

/// A node between the two of the small program, which are "linear" and "relu".
void insert(json& program, const json& added) {
  json& nodes = graph(program)["nodes"];
  nodes.insert(nodes.begin() + 1, added);
}

using Inputs = std::vector<std::pair<std::string, json>>;

json call(const std::string& target, const Inputs& inputs,
          const std::vector<json>& outputs = std::vector<json>()) {
  json arguments = json::array();
  for (const auto& [name, value] : inputs) {
    arguments.push_back({{"name", name}, {"arg", value}, {"kind", 1}});
  }
  return {{"name", "added"},
          {"target", target},
          {"inputs", arguments},
          {"outputs", outputs},
          {"metadata", json::object()}};
}

json tensor(const std::string& name) { return {{"as_tensor", {{"name", name}}}}; }
json integer(int64_t value) { return {{"as_int", value}}; }
json text(const std::string& value) { return {{"as_string", value}}; }
json integers(const std::vector<int64_t>& values) { return {{"as_ints", values}}; }
/// A number that a node makes, by the name "new".
json symbol(const std::string& kind) { return {{kind, {{"as_name", "new"}}}}; }
const std::vector<json> kNew = {tensor("new")};
const std::vector<json> kNewInteger = {symbol("as_sym_int")};

TEST_F(ExportedReader, FilesThatAreNoArchives) {
  expect_has(error_of<CheckpointError>([] { load_exported("nowhere.pt2"); }),
             {"cannot read exported program \"nowhere.pt2\": there is no such file"});
  EXPECT_EQ(error_of<UsageError>([] { load_exported(""); }),
            "[smp] smp::load_exported got no file. Give that of a program exported in training "
            "mode, in evaluation mode, or both");
  for (const std::string& bytes : {std::string(), std::string("PK"), std::string(1000, 'x')}) {
    expect_has(refused_bytes(bytes),
               {"bytes.pt2\": ",
                "Expected an archive that torch.export.save of torch 2.9 or later "
                "has written"});
  }
}

TEST_F(ExportedReader, TruncatedArchives) {
  std::ifstream file(archive("small"), std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  for (size_t length = 0; length < bytes.size(); length += 97) {
    refused_bytes(bytes.substr(0, length));
  }
}

TEST_F(ExportedReader, ArchivesWithoutARecord) {
  for (const char* name : {"models/model.json", kWeights,
                           "data/constants/model_constants_config.json", "data/weights/weight_0"}) {
    Records records = records_of(archive("small"));
    ASSERT_EQ(records.erase(name), 1u) << name;
    refused_bytes(archive_of(records));
  }
}

TEST_F(ExportedReader, OtherVersions) {
  expect_has(refused([](json& p) { p["schema_version"]["major"] = 9; }),
             {"has schema version 9, and this version of smp reads version 8"});
  expect_has(refused([](json& p) { p["opset_version"]["aten"] = 11; }),
             {"uses version 11 of the operators, and this version of smp knows version 10"});
}

TEST_F(ExportedReader, UnknownKeysAreIgnored) {
  load_exported(edited(folder_, [](json& p) {
    p["later"] = {{"a", 1}};
    graph(p)["later"] = 2;
    node(p, 0)["later"] = 3;
  }));
}

TEST_F(ExportedReader, MalformedPrograms) {
  const std::vector<std::pair<Edit, std::string>> cases = {
      {[](json& p) { p = json::array(); }, "malformed at its beginning: expected an object"},
      {[](json& p) { p.erase("graph_module"); }, "expected an object with \"graph_module\""},
      {[](json& p) { graph(p)["nodes"] = 3; },
       "graph_module.graph.nodes\": expected an array, got 3"},
      {[](json& p) { node(p, 0)["target"] = 3; }, "nodes[0].target\": expected a string, got 3"},
      {[](json& p) { node(p, 0)["inputs"][0]["arg"] = json::object(); }, "expected an object with"},
      {[](json& p) {
         node(p, 0)["outputs"][0] = {{"as_string", "x"}};
       },
       "a number or nothing"},
      {[](json& p) { p["graph_module"]["signature"]["input_specs"].erase(0); },
       "one for each input of the graph"},
      {[](json& p) { p["graph_module"]["signature"]["output_specs"].clear(); },
       "one for each output of the graph"},
      {[](json& p) { graph(p)["tensor_values"].erase("x"); }, "expected an object with \"x\""},
      {[](json& p) { graph(p)["tensor_values"]["x"]["dtype"] = 99; }, "a known data type"},
      {[](json& p) { graph(p)["tensor_values"]["x"]["layout"] = 1; }, "the layout of dense"},
      {[](json& p) {
         graph(p)["tensor_values"]["x"]["sizes"][1] = {{"as_int", -3}};
       },
       "a size that is not negative"},
      {[](json& p) { graph(p)["tensor_values"]["x"]["device"]["type"] = "toaster"; },
       "a device that this libtorch knows"},
      {[](json& p) { p["graph_module"]["module_call_graph"].clear(); }, "the outermost module"},
      {[](json& p) {
         p["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = "[1, {\"type\": 3}]";
       },
       "expected a string"},
      {[](json& p) { p["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = "[["; },
       "malformed at"},
      {[](json& p) { p["schema_version"]["major"] = 1e30; }, "expected an integer, got 1e+30"}};
  for (const auto& [edit, text] : cases) {
    const std::string error = refused(edit);
    expect_has(error, {"is malformed at", text, "Write it again by torch.export.save"});
  }
}

TEST_F(ExportedReader, ValuesThatNothingMakes) {
  expect_has(refused([](json& p) { std::swap(node(p, 0), node(p, 1)); }),
             {"node \"relu\" reads value \"linear\", which nothing before it makes"});
  expect_has(refused([](json& p) { node(p, 0)["inputs"][0]["arg"] = tensor("relu"); }),
             {"node \"linear\" reads value \"relu\", which nothing before it makes"});
  expect_has(refused([](json& p) { node(p, 1)["outputs"][0] = tensor("linear"); }),
             {"value \"linear\" is made twice. The file is damaged"});
}

TEST_F(ExportedReader, WhatIsRefusedByName) {
  expect_has(refused([](json& p) {
               insert(p, call("torch.ops.aten.relu.default",
                              {{"self", {{"as_custom_obj", {{"name", "o"}}}}}}));
             }),
             {"node \"added\" has an argument of kind \"as_custom_obj\", which this version cannot "
              "load. Rewrite that part"});
  expect_has(refused([](json& p) {
               p["graph_module"]["signature"]["input_specs"][0] = {
                   {"custom_obj", {{"arg", {{"name", "p_layer_weight"}}}}}};
             }),
             {"has an input of kind \"custom_obj\" (custom objects, and tokens of operators with "
              "side effects, cannot be loaded)"});
  expect_has(refused([](json& p) {
               p["graph_module"]["signature"]["output_specs"][0] = {
                   {"loss_output", {{"arg", {{"name", "relu"}}}}}};
             }),
             {"has a result of kind \"loss_output\": it is no program of a forward pass"});
  expect_has(refused([](json& p) {
               graph(p)["tensor_values"]["x"]["device"] = {{"type", "cuda"}, {"index", 0}};
             }),
             {"uses several devices, cpu and cuda:0. A loaded program runs on one"});
  expect_has(refused([](json& p) {
               graph(p)["tensor_values"]["x"]["sizes"][0]["as_expr"]["expr_str"] =
                   "Pow(Symbol('s0', integer=True), Integer(2))";
             }),
             {"an input has size \"Pow(Symbol('s0', integer=True), Integer(2))\", which is no sum "
              "of multiples of dynamic sizes"});
  for (const char* name : {"cond", "scan", "map_impl", "while_loop", "flex_attention"}) {
    expect_has(refused([&](json& p) {
                 insert(p, call(std::string("torch.ops.higher_order.") + name, {}));
               }),
               {std::string("(torch.ops.higher_order.") + name +
                ") is a higher-order operator that cannot be loaded. Loaded are torch.no_grad"});
  }
  expect_has(
      refused([](json& p) {
        insert(p, call("torch.ops.aten.from_file.default", {{"filename", text("/etc/passwd")}}));
      }),
      {"reaches files or memory outside of its tensors, which is refused"});
}

TEST_F(ExportedReader, InputsThatFitNoSlot) {
  const auto edited_input = [](const json& in_graph, const json& spec) {
    return [=](json& p) {
      graph(p)["inputs"][2] = in_graph;
      node(p, 0)["inputs"][0]["arg"] = tensor("p_layer_weight");  // no more "x"
      p["graph_module"]["signature"]["input_specs"][2] = spec;
    };
  };
  const auto user = [](const json& argument) { return json{{"user_input", {{"arg", argument}}}}; };
  const auto constant = [](const json& value) {
    return json{{"constant_input", {{"name", "x"}, {"value", value}}}};
  };
  const json number = {{"as_sym_int", {{"as_name", "x"}}}};
  const json another = {{"as_sym_int", {{"as_name", "y"}}}};
  const json device = {{"as_device", {{"type", "cpu"}, {"index", nullptr}}}};
  const std::string other = "the graph's input of that place";
  const std::string kind = "tensors, numbers and constants where the graph has these";
  const std::string fixed = "a number, a string or nothing";
  const std::vector<std::tuple<json, json, std::string>> cases = {
      {tensor("x"), user(number), other},
      {tensor("x"), user(tensor("p_layer_weight")), other},
      {tensor("x"), user(integer(3)), other},
      {number, user(tensor("x")), other},
      {number, user(another), other},
      {number, user(number), "sym_int_values\": expected an object with \"x\""},
      {number, constant(text("three")), kind},
      {tensor("x"), constant(integer(3)), kind},
      {integer(3), constant(integers({3})), fixed},
      {integer(3), user(device), fixed},
      {integer(3), user(integers({3})), fixed},
      {integer(3), {{"buffer", {{"buffer_name", "b"}}}}, kind}};
  for (const auto& [in_graph, spec, text] : cases) {
    SCOPED_TRACE(spec.dump());
    expect_has(refused(edited_input(in_graph, spec)), {"is malformed at", text});
  }
}

TEST_F(ExportedReader, NamesOfWhatIsWritten) {
  const auto written = [&](const json& spec) {
    return refused([&](json& p) { p["graph_module"]["signature"]["output_specs"][0] = spec; });
  };
  const std::string expected = "tensors for buffers and inputs that the program has";
  const json argument = {{"name", "relu"}};
  for (const char* name : {"layer.weight", "p_layer_weight", "nothing"}) {
    expect_has(written({{"user_input_mutation", {{"arg", argument}, {"user_input_name", name}}}}),
               {expected});
    expect_has(written({{"buffer_mutation", {{"arg", argument}, {"buffer_name", name}}}}),
               {expected});
  }
}

/// They take memory by its size, or trust their caller.
TEST_F(ExportedReader, OperatorsThatReachOutside) {
  for (const char* name :
       {"aten._reshape_alias.default", "aten.set_.source_Tensor", "aten.resize_.default",
        "aten._coalesced_.default", "inductor._alloc_from_pool.default",
        "inductor._reinterpret_tensor.default"}) {
    expect_has(refused([&](json& p) { insert(p, call(std::string("torch.ops.") + name, {})); }),
               {std::string("(torch.ops.") + name +
                ") reaches files or memory outside of its tensors, which is refused"});
  }
}

TEST_F(ExportedReader, NodesThatFitNoOperator) {
  const auto error_of_node = [&](const json& added) {
    return refused([&](json& p) { insert(p, added); });
  };
  expect_has(error_of_node(call("torch.ops.mine.thing.default", {})),
             {"node \"added\" (torch.ops.mine.thing.default) calls an operator that is not "
              "registered in this process. Link the library that registers it"});
  expect_has(error_of_node(call("os.system", {{"command", text("true")}})),
             {"(os.system) calls what this version cannot load. Only operators"});
  const std::string relu = "torch.ops.aten.relu.default";
  expect_has(error_of_node(call(relu, {{"self", tensor("linear")}})),
             {"has another number of results than its operator"});
  expect_has(error_of_node(call(relu, {{"it", tensor("linear")}}, kNew)),
             {"has an argument \"it\", which the operator lacks"});
  expect_has(error_of_node(call(relu, {}, kNew)), {"lacks argument \"self\""});
  expect_has(
      error_of_node(call(relu, {{"self", tensor("linear")}, {"self", tensor("linear")}}, kNew)),
      {"is given argument \"self\" twice"});
  expect_has(error_of_node(call(relu, {{"self", text("x")}}, kNew)),
             {"has an argument \"self\" that is no Tensor"});
  for (const char* argument : {"dtype", "layout", "memory_format"}) {
    for (int64_t number : {-1, 9999}) {
      expect_has(
          error_of_node(call("torch.ops.aten.empty_like.default",
                             {{"self", tensor("linear")}, {argument, integer(number)}}, kNew)),
          {"has a dtype, layout or memory format that there is not"});
    }
  }
  expect_has(error_of_node(call("_operator.mul", {{"a", integers({1})}, {"b", integer(2)}})),
             {"(_operator.mul) takes no such argument"});
  expect_has(
      error_of_node(call("torch.ops.higher_order.wrap_with_set_grad_enabled", {{"", integer(3)}})),
      {"has arguments that it does not take"});
}

TEST_F(ExportedReader, WeightsThatDoNotFit) {
  const auto weight = [](json& config) -> json& { return config["config"]["layer.weight"]; };
  const auto meta = [&](json& config) -> json& { return weight(config)["tensor_meta"]; };
  for (const Edit& edit :
       std::vector<Edit>{[&](json& c) { meta(c)["sizes"][0] = integer(3); },
                         [&](json& c) { meta(c)["strides"][0] = integer(1000); },
                         [&](json& c) {
                           meta(c)["strides"] = {integer(0), integer(0)};
                           meta(c)["sizes"][0] = integer(int64_t{1} << 40);
                         },
                         [&](json& c) {
                           meta(c)["sizes"] = {integer(int64_t{1} << 62), integer(4)};
                         },
                         [&](json& c) { meta(c)["storage_offset"] = integer(1); },
                         [&](json& c) { meta(c)["storage_offset"] = integer(INT64_MAX); },
                         [&](json& c) { meta(c)["dtype"] = 8; }}) {
    expect_has(refused(edit, kWeights), {"a tensor within its record, which has 24 bytes"});
  }
  expect_has(refused([&](json& c) { meta(c)["sizes"][0] = integer(-1); }, kWeights),
             {"a number that is not negative"});
  expect_has(
      refused([&](json& c) { weight(c)["use_pickle"] = true; }, kWeights),
      {"\"layer.weight\" is stored as a pickle, or is no tensor, and pickles are never read"});
  refused([&](json& c) { weight(c)["path_name"] = "../../../../etc/passwd"; }, kWeights);
  refused([&](json& c) { weight(c)["path_name"] = "/etc/passwd"; }, kWeights);
  expect_has(refused([](json& c) { c["config"].erase("layer.bias"); }, kWeights),
             {"has no data for \"layer.bias\". The file is damaged"});
  expect_has(refused(
                 [&](json& c) {
                   meta(c)["dtype"] = 4;
                   meta(c)["requires_grad"] = true;
                 },
                 kWeights),
             {"requires a gradient and has type Int, which has none"});
}

TEST_F(ExportedReader, PathsOfModules) {
  const auto named = [&](const std::string& path) {
    Records records = records_of(archive("small"));
    for (const char* record : {"models/model.json", kWeights}) {
      std::string& text = records.at(record);
      const std::string from = "\"layer.weight\"";
      for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + 1)) {
        text.replace(at, from.size(), json(path).dump());
      }
    }
    return refused_bytes(archive_of(records));
  };
  std::string deep = "a";
  for (int i = 0; i < 200; ++i) deep += ".a";
  for (const std::string& path :
       {std::string(), std::string("."), std::string("a..b"), std::string("a."), deep}) {
    expect_has(named(path), {"is no dotted path of at most 100 names"});
  }
}

TEST_F(ExportedReader, ProgramsOfDifferentModels) {
  expect_has(
      error_of<CheckpointError>(
          [] { load_exported(ExportedPrograms().train(archive("small")).eval(archive("modes"))); }),
      {"are not of one model: the first has no \"a.weight\" of type Float and shape [8, 4]"});
}

TEST_F(ExportedReader, ErrorsOfARunNameTheNode) {
  expect_has(refused_run<Error>([](json& p) {
               insert(p, call("torch.ops.aten.view.default",
                              {{"self", tensor("linear")}, {"size", integers({7})}}, kNew));
             }),
             {"edited.pt2\": node \"added\" (torch.ops.aten.view.default): ", "invalid for input"});
  expect_has(
      refused_run<CheckpointError>([](json& p) {
        insert(p, call("torch.ops.aten.relu.default", {{"self", tensor("linear")}}, kNewInteger));
      }),
      {"returned a value of type Tensor where the program has integer \"new\""});
  expect_has(
      refused_run<CheckpointError>([](json& p) {
        insert(p,
               call("torch.ops.aten.split.Tensor",
                    {{"self", tensor("linear")}, {"split_size", integer(1)}, {"dim", integer(1)}},
                    {{{"as_tensors", {{{"name", "one"}}}}}}));
      }),
      {"returned another number of values than the program has"});
  expect_has(
      refused_run<UsageError>([](json& p) {
        insert(p, call("_operator.floordiv", {{"a", integer(1)}, {"b", integer(0)}}, kNewInteger));
      }),
      {"arithmetic on sizes in an exported program: a division by zero. Pass inputs of sizes "
       "like those"});
  expect_has(refused_run<UsageError>([](json& p) {
               graph(p)["inputs"][2] = {{"as_sym_int", {{"as_name", "x"}}}};
               graph(p)["sym_int_values"]["x"] = integer(4);
               node(p, 0)["inputs"][0]["arg"] = tensor("p_layer_weight");
               p["graph_module"]["signature"]["input_specs"][2]["user_input"]["arg"] =
                   graph(p)["inputs"][2];
             }),
             {"argument x: expected a number, integer, got a value of type Tensor"});
}

/// A region of activation checkpointing, which torch 2.11 itself does not export, runs as it is.
TEST_F(ExportedReader, RegionsOfCheckpointing) {
  const auto negated = [&](const json& argument) {
    return edited(folder_, [&](json& p) {
      json body = {{"inputs", std::vector<json>{tensor("a")}},
                   {"outputs", std::vector<json>{tensor("b")}},
                   {"nodes", std::vector<json>{call("torch.ops.aten.neg.default",
                                                    {{"self", tensor("a")}}, {tensor("b")})}}};
      json function = {{"as_graph", {{"name", "body"}, {"graph", body}}}};
      insert(p,
             call("torch.ops.higher_order.tag_activation_checkpoint",
                  {{"", function}, {"", argument}, {"use_reentrant", {{"as_bool", false}}}}, kNew));
      node(p, 2)["inputs"][0]["arg"] = tensor("new");
    });
  };
  ExportedModule model = load_exported(negated(tensor("linear")));
  const auto x = torch::ones({4, 3});
  const auto linear = torch::linear(x, model->named_parameters()["layer.weight"],
                                    model->named_parameters()["layer.bias"]);
  EXPECT_TRUE(torch::equal(model(x).toTensor(), (-linear).relu()));
  expect_has(error_of<CheckpointError>([&] { load_exported(negated(integer(3))); }),
             {"(torch.ops.higher_order.tag_activation_checkpoint) has arguments that it does not "
              "take"});
}

json real(double value) { return {{"as_float", value}}; }

/// Expected values are Python's, with the sign of a zero.
TEST_F(ExportedReader, ArithmeticOfRealNumbersIsThatOfPython) {
  const auto result = [&](const std::string& target, const json& a, const json& b) {
    ExportedModule model = load_exported(edited(folder_, [&](json& p) {
      insert(p, call(target, {{"a", a}, {"b", b}}, {symbol("as_sym_float")}));
      graph(p)["outputs"][0] = symbol("as_sym_float");
    }));
    return model(torch::ones({4, 3})).toDouble();
  };
  const auto expect_bits = [&](const std::string& target, const json& a, const json& b,
                               double expected) {
    const double got = result("_operator." + target, a, b);
    EXPECT_EQ(got, expected) << target << a << b;
    EXPECT_EQ(std::signbit(got), std::signbit(expected)) << target << a << b;
  };
  expect_bits("floordiv", real(7.5), real(2.0), 3.0);
  expect_bits("floordiv", real(-7.5), real(2.0), -4.0);
  expect_bits("floordiv", real(7.5), integer(-2), -4.0);
  expect_bits("floordiv", integer(7), real(2.0), 3.0);
  expect_bits("floordiv", real(1.0), real(0.1), 9.0);
  expect_bits("floordiv", real(-1e-20), real(1.0), -1.0);
  expect_bits("floordiv", real(0.0), real(-2.0), -0.0);
  expect_bits("floordiv", real(-0.5), real(-2.0), 0.0);
  expect_bits("floordiv", real(1e300), real(-1e-8), -1e308);
  expect_bits("mod", real(-7.5), real(2.0), 0.5);
  expect_bits("mod", real(7.5), real(-2.0), -0.5);
  expect_bits("mod", real(4.0), real(-2.0), -0.0);
  expect_bits("mod", real(1.0), real(0.1), 0.09999999999999995);
  expect_bits("pow", integer(2), integer(-2), 0.25);
  expect_bits("pow", real(-2.0), integer(3), -8.0);
  for (const char* target : {"_operator.floordiv", "_operator.mod", "_operator.truediv"}) {
    expect_has(error_of<UsageError>([&] { result(target, real(1.0), real(0.0)); }),
               {"a division by zero"});
  }
  expect_has(error_of<UsageError>([&] { result("_operator.pow", integer(0), integer(-1)); }),
             {"a division by zero"});
  expect_has(error_of<UsageError>([&] { result("_operator.pow", real(-2.0), real(0.5)); }),
             {"a power that is no real number"});
}

/// Python's torch._sym_sqrt, by the name that torch.export.save gives it.
TEST_F(ExportedReader, SquareRoots) {
  const auto root = [&](const json& a) {
    ExportedModule model = load_exported(edited(folder_, [&](json& p) {
      insert(p, call("torch._sym_sqrt", {{"a", a}}, {symbol("as_sym_float")}));
      graph(p)["outputs"][0] = symbol("as_sym_float");
    }));
    return model(torch::ones({4, 3})).toDouble();
  };
  EXPECT_EQ(root(integer(9)), 3.0);
  expect_has(error_of<UsageError>([&] { root(integer(-1)); }),
             {"the square root of a negative number"});
}

/// Arithmetic gives Python's results.
TEST_F(ExportedReader, ArithmeticIsThatOfPython) {
  const auto result = [&](const std::string& target, int64_t a, int64_t b,
                          const char* kind = "as_sym_int") {
    ExportedModule model = load_exported(edited(folder_, [&](json& p) {
      insert(p, call(target, {{"a", integer(a)}, {"b", integer(b)}}, {symbol(kind)}));
      graph(p)["outputs"][0] = symbol(kind);
    }));
    return model(torch::ones({4, 3}));
  };
  EXPECT_EQ(result("_operator.floordiv", -7, 2).toInt(), -4);
  EXPECT_EQ(result("_operator.floordiv", 7, -2).toInt(), -4);
  EXPECT_EQ(result("_operator.floordiv", -7, -2).toInt(), 3);
  EXPECT_EQ(result("_operator.floordiv", 0, -2).toInt(), 0);
  EXPECT_EQ(result("_operator.floordiv", -6, 2).toInt(), -3);
  EXPECT_EQ(result("_operator.mod", -6, 2).toInt(), 0);
  EXPECT_EQ(result("_operator.mod", -7, 2).toInt(), 1);
  EXPECT_EQ(result("_operator.mod", 7, -2).toInt(), -1);
  EXPECT_EQ(result("_operator.floordiv", INT64_MIN + 1, -1).toInt(), INT64_MAX);
  EXPECT_EQ(result("_operator.pow", 3, 5).toInt(), 243);
  EXPECT_EQ(result("_operator.truediv", 7, 2, "as_sym_float").toDouble(), 3.5);
  EXPECT_EQ(result("_operator.lt", 2, 3, "as_sym_bool").toBool(), true);
  EXPECT_EQ(result("torch.sym_max", 2, 3).toInt(), 3);
  EXPECT_EQ(result("_operator.rshift", -5, 1).toInt(), -3);
  expect_has(error_of<UsageError>([&] { result("_operator.mul", int64_t{1} << 40, 1 << 30); }),
             {"a result has more than 64 bits"});
}

TEST(LinearSize, ParsesWhatSympyWrites) {
  using exported::parse_linear_size;
  const auto size = parse_linear_size(
      "Add(Mul(Integer(2), Symbol('s0', positive=True, integer=True)), Integer(-1))");
  ASSERT_TRUE(size.has_value());
  EXPECT_EQ(size->to_string(), "2*s0 + -1");
  EXPECT_EQ(size->evaluate({{"s0", 5}}), 9);
  EXPECT_EQ(size->evaluate({}), std::nullopt);
  EXPECT_EQ(size->solve({}, 9), std::make_pair(std::string("s0"), int64_t{5}));
  EXPECT_EQ(size->solve({}, 8), std::nullopt);
  EXPECT_EQ(size->evaluate({{"s0", INT64_MAX}}), std::nullopt);
  std::string deep;
  for (int i = 0; i < 100000; ++i) deep += "Add(";
  for (const std::string& text :
       {std::string(), std::string("Integer(1"), std::string("Integer(99999999999999999999)"),
        std::string("Integer(1) "), std::string("Integer(1)x"), std::string("Symbol(s0)"),
        std::string("Mul(Symbol('a'), Symbol('b'))"), std::string("Add()"), deep}) {
    EXPECT_EQ(parse_linear_size(text).has_value(), text == "Integer(1) ") << text.substr(0, 40);
  }
}

}  // namespace
}  // namespace smp::testing
