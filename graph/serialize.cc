// SPDX-License-Identifier: Apache-2.0
#include "graph/serialize.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <utility>

#include "core/check.h"
#include "core/json.h"
#include "core/json_reader.h"
#include "core/text.h"
#include "graph/constant_json.h"
#include "graph/content.h"

namespace smp::graph {
namespace {

using core::JsonReader;
using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "smp graph";
constexpr int64_t kVersion = 1;
constexpr size_t kLongestName = 2000;
constexpr const char* kSaveAgain = "Save the graph again (configuration parameter \"graph_file\").";

/// A name is shown in plans and pictures, and cut at its dots there: it has a sane length, and
/// nothing that a terminal or a viewer would do something else with than show it.
bool is_shown_as_it_is(const std::string& name) {
  return name.size() <= kLongestName && core::printable(name, kLongestName) == name;
}

std::string fingerprint_text(const Graph& graph) {
  std::ostringstream out;
  out << std::hex << graph.fingerprint();
  return out.str();
}

// Writing.

void check_name(const std::string& name) {
  SMP_CHECK_WITH(CaptureError, is_shown_as_it_is(name),
                 "cannot save the graph: expected names of modules and parameters of at most ",
                 kLongestName, " bytes of UTF-8 without control characters, got \"",
                 core::printable(name, 100),
                 "\". Rename it, or leave out the configuration parameter \"graph_file\".");
}

template <class Range>
Json array(const Range& range) {
  Json result = Json::array();
  for (const auto& element : range) result.push_back(element);
  return result;
}

Json argument_to_json(const Operator& op, size_t index) {
  const Argument& argument = op.arguments[index];
  switch (argument.kind) {
    case Argument::Kind::kTensor:
      return {{"tensor", argument.values[0]}};
    case Argument::Kind::kTensorList:
      return {{"tensors", array(argument.values)}};
    case Argument::Kind::kOptionalTensorList:
      return {{"optional_tensors", array(argument.values)}};
    case Argument::Kind::kConstant:
      break;
  }
  Json constant = constant_to_json(argument.constant);
  if (constant.is_null() && !argument.constant.isNone()) {
    const auto& schema = op.handle.schema();
    // Values that may change from step to step are no part of the graph: their text will do.
    SMP_CHECK_WITH(CaptureError, is_patchable(schema, index), "cannot save the graph: argument \"",
                   schema.arguments()[index].name(), "\" of operator ", op.name(), " is of type ",
                   argument.constant.tagKind(),
                   ", which has no JSON form. Leave out the "
                   "configuration parameter \"graph_file\".");
    constant = constant_to_string(argument.constant);
  }
  return {{"constant", std::move(constant)}};
}

/// Calls `visit(name, member)` for each setting of a mode, under its name in a file.
template <class Visitor>
void for_each_setting(const Visitor& visit) {
  visit("grad", &ExecutionMode::grad);
  visit("inference", &ExecutionMode::inference);
  visit("below_autograd", &ExecutionMode::below_autograd);
  visit("below_views", &ExecutionMode::below_views);
  visit("autocast_cpu", &ExecutionMode::autocast_cpu);
  visit("autocast_accelerator", &ExecutionMode::autocast_accelerator);
  visit("autocast_cpu_dtype", &ExecutionMode::autocast_cpu_dtype);
  visit("autocast_accelerator_dtype", &ExecutionMode::autocast_accelerator_dtype);
  visit("autocast_cache", &ExecutionMode::autocast_cache);
  visit("default_dtype", &ExecutionMode::default_dtype);
  visit("after_backward", &ExecutionMode::after_backward);
  visit("partition", &ExecutionMode::partition);
}

/// Only the differences from the default mode.
Json mode_to_json(const ExecutionMode& mode) {
  const ExecutionMode usual;
  Json result = Json::object();
  for_each_setting([&](const char* name, const auto member) {
    const auto value = mode.*member;
    if (value == usual.*member) return;
    if constexpr (std::is_same_v<decltype(value), const at::ScalarType>) {
      result[name] = c10::toString(value);
    } else {
      result[name] = value;
    }
  });
  return result;
}

Json to_json(const Value& value) {
  Json result = {{"kind", to_string(value.kind)},
                 {"name", value.name},
                 {"dtype", c10::toString(value.meta.dtype)},
                 {"sizes", array(value.meta.sizes)},
                 {"strides", array(value.meta.strides)},
                 {"device", value.meta.device.str()},
                 {"requires_grad", value.meta.requires_grad},
                 {"producer", value.producer},
                 {"alias_set", value.alias_set}};
  if (is_wrapped_number(value.content)) result["number"] = constant_to_json(value.content.item());
  return result;
}

Json to_json(const Operator& op, int schema) {
  Json arguments = Json::array();
  for (size_t i = 0; i < op.arguments.size(); ++i) arguments.push_back(argument_to_json(op, i));
  return {{"schema", schema},
          {"scope", op.scope},
          {"arguments", std::move(arguments)},
          {"results", array(op.results)},
          {"result_is_argument", array(op.result_is_argument)},
          {"list_lengths", array(op.list_lengths)},
          {"writes", array(op.writes)},
          {"mode", mode_to_json(op.mode)},
          {"reads_parameter", op.reads_parameter},
          {"random_ordinal", op.random_ordinal},
          {"first_result", op.first_result},
          {"cost",
           {{"forward_us", op.cost.forward_us},
            {"backward_us", op.cost.backward_us},
            {"output_bytes", op.cost.output_bytes},
            {"saved_bytes", op.cost.saved_bytes}}}};
}

Json to_json(const BackwardRoot& root) {
  return {{"value", root.value}, {"gradient", root.gradient}, {"mode", mode_to_json(root.mode)}};
}

/// "name": [...] with an element a line.
void append_lines(std::string& text, const char* name, const std::vector<Json>& elements) {
  text += c10::str(",\n\"", name, "\": [");
  const char* separator = "\n  ";
  for (const Json& element : elements) {
    text += separator + element.dump();
    separator = ",\n  ";
  }
  text += elements.empty() ? "]" : "\n]";
}

// Reading.

/// Reads one file. A reader of JSON that knows how many values, alias sets and operators there are.
class GraphReader {
 public:
  explicit GraphReader(const JsonReader& root) : root_(root) {
    check_version();
    graph_.alias_sets = static_cast<int>(root.at("alias_sets").integer(0, kMaxCount));
    value_count_ = static_cast<int64_t>(root.at("values").size());
    operator_count_ = static_cast<int64_t>(root.at("operators").size());
  }

  Graph run() && {
    for (const JsonReader& in : root_.at("values").elements()) graph_.values.push_back(value(in));
    for (const JsonReader& in : root_.at("schemas").elements()) schemas_.push_back(schema(in));
    for (const JsonReader& in : root_.at("operators").elements()) add_operator(in);
    for (const JsonReader& in : root_.at("inputs").elements()) graph_.inputs.push_back(id(in));
    for (const JsonReader& in : root_.at("outputs").elements()) graph_.outputs.push_back(id(in));
    for (const JsonReader& in : root_.at("roots").elements()) {
      graph_.roots.push_back(
          {defined_id(in.at("value")), id(in.at("gradient")), mode(in.at("mode"))});
    }
    check_producers();
    const JsonReader fingerprint = root_.at("fingerprint");
    if (fingerprint.text() != fingerprint_text(graph_)) {
      fingerprint.fail(
          "the graph is not the one that was saved: the file was changed in more than "
          "its costs, or written by another version of libtorch",
          kSaveAgain);
    }
    return std::move(graph_);
  }

 private:
  static constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max();

  template <class Vector>
  static Vector integers(const JsonReader& array, int64_t minimum, int64_t maximum) {
    Vector result;
    for (const JsonReader& in : array.elements()) {
      result.push_back(static_cast<typename Vector::value_type>(in.integer(minimum, maximum)));
    }
    return result;
  }

  void check_version() const {
    const auto format = root_.find("format");
    if (!format || format->value() != kFormat) {
      root_.fail(
          "this is not a saved graph: it has no \"format\": \"" + std::string(kFormat) + "\"",
          "Give a file that was written for the configuration parameter \"graph_file\".");
    }
    const JsonReader version = root_.at("version");
    if (version.integer() != kVersion) {
      version.fail(
          c10::str("expected version ", kVersion, " of saved graphs, got ", version.integer()),
          kSaveAgain);
    }
  }

  ValueId id(const JsonReader& in) const {
    return static_cast<ValueId>(in.integer(kUndefined, value_count_ - 1));
  }
  ValueId defined_id(const JsonReader& in) const {
    return static_cast<ValueId>(in.integer(0, value_count_ - 1));
  }

  static ValueKind kind(const JsonReader& in) {
    const std::string name = in.text();
    for (int i = 0; i <= static_cast<int>(ValueKind::kResult); ++i) {
      if (name == to_string(static_cast<ValueKind>(i))) return static_cast<ValueKind>(i);
    }
    in.fail_expected("a kind of value such as \"parameter\"");
  }

  static at::ScalarType dtype(const JsonReader& in) {
    const std::string name = in.text();
    for (int i = 0; i < static_cast<int>(at::ScalarType::NumOptions); ++i) {
      const auto type = static_cast<at::ScalarType>(i);
      if (name == c10::toString(type)) return type;
    }
    in.fail_expected("a dtype such as \"Float\"");
  }

  /// Whether the number of bytes can be told.
  static bool is_size_of_a_tensor(const TensorMeta& meta) {
    if (meta.dtype == at::ScalarType::Undefined) return false;
    int64_t bytes = static_cast<int64_t>(c10::elementSize(meta.dtype));
    for (const int64_t size : meta.sizes) {
      if (size > 0 && bytes > kMaxElements / size) return false;
      bytes *= std::max<int64_t>(size, 1);
    }
    return true;
  }

  static std::string name(const JsonReader& in) {
    const std::string name = in.text();
    if (!is_shown_as_it_is(name)) {
      in.fail_expected(
          c10::str("a name of at most ", kLongestName, " bytes without control characters"));
    }
    return name;
  }

  static at::Tensor wrapped(const JsonReader& in, const TensorMeta& meta) {
    const c10::IValue number = constant_of(in);
    const bool is_number = number.isScalar() && meta.sizes.empty() && meta.device.is_cpu();
    in.expect(is_number, "the number of a tensor of the CPU without dimensions");
    try {
      const at::Tensor made = wrapped_number(number.toScalar()), typed = made.to(meta.dtype);
      stay_wrapped_number(made, typed);
      return typed;
    } catch (const c10::Error&) {
      in.fail_expected("a number of the tensor's type");
    }
  }

  Value value(const JsonReader& in) const {
    Value value;
    value.kind = kind(in.at("kind"));
    value.name = name(in.at("name"));
    value.meta.dtype = dtype(in.at("dtype"));
    value.meta.sizes = integers<decltype(value.meta.sizes)>(in.at("sizes"), 0, kMaxElements);
    value.meta.strides = integers<decltype(value.meta.strides)>(in.at("strides"), 0, kMaxElements);
    if (value.meta.strides.size() != value.meta.sizes.size()) {
      in.at("strides").fail_expected(
          c10::str("one stride for each of the ", value.meta.sizes.size(), " sizes"));
    }
    if (!is_size_of_a_tensor(value.meta)) in.at("sizes").fail_expected("the sizes of a tensor");
    value.meta.device = device_of(in.at("device"));
    value.meta.requires_grad = in.at("requires_grad").boolean();
    value.producer = static_cast<int>(in.at("producer").integer(-1, operator_count_ - 1));
    value.alias_set = static_cast<int>(in.at("alias_set").integer(0, graph_.alias_sets - 1));
    if (const auto number = in.find("number")) value.content = wrapped(*number, value.meta);
    return value;
  }

  /// Whether libtorch can be given the schema: its parser recurs over brackets.
  static bool is_flat(const std::string& schema) {
    constexpr size_t kLongest = size_t{16} << 10;
    constexpr int kDeepest = 16;
    int depth = 0, deepest = 0;
    for (const char c : schema) {
      if (c == '(' || c == '[') deepest = std::max(deepest, ++depth);
      if (c == ')' || c == ']') --depth;
    }
    return schema.size() <= kLongest && deepest <= kDeepest;
  }

  static c10::OperatorHandle schema(const JsonReader& in) {
    const std::string text = in.text();
    if (!is_flat(text)) in.fail_expected("the schema of an operator");
    try {
      auto& dispatcher = c10::Dispatcher::singleton();
      const auto name = torch::jit::parseName(text.substr(0, text.find('(')));
      if (const auto known = dispatcher.findSchema(name)) return *known;
      TORCH_CHECK(name.getNamespace().has_value());  // TorchScript looks at all, and needs one
      // The registrations of extensions. They are never undone, since graphs keep handles.
      static auto& registrations = *new std::vector<c10::RegistrationHandleRAII>();
      registrations.push_back(
          dispatcher.registerDef(torch::jit::parseSchema(text), "read from a saved graph"));
      return dispatcher.findSchema(name).value();
    } catch (const std::exception&) {  // the parser's errors are no c10::Error
      in.fail_expected("the schema of an operator");
    }
  }

  Argument argument(const JsonReader& in) const {
    using Values = decltype(Argument::values);
    Argument result;
    if (const auto tensor = in.find("tensor")) {
      result.kind = Argument::Kind::kTensor;
      result.values = {id(*tensor)};
    } else if (const auto tensors = in.find("tensors")) {
      result.kind = Argument::Kind::kTensorList;
      result.values = integers<Values>(*tensors, kUndefined, value_count_ - 1);
    } else if (const auto optional = in.find("optional_tensors")) {
      result.kind = Argument::Kind::kOptionalTensorList;
      result.values = integers<Values>(*optional, kUndefined, value_count_ - 1);
    } else {
      result.constant = constant_of(in.at("constant"));
    }
    return result;
  }

  static void read(const JsonReader& in, bool& flag) { flag = in.boolean(); }
  static void read(const JsonReader& in, at::ScalarType& type) { type = dtype(in); }
  static void read(const JsonReader& in, int& count) {
    count = static_cast<int>(in.integer(0, kMaxCount));
  }

  static ExecutionMode mode(const JsonReader& in) {
    ExecutionMode mode;
    for_each_setting([&](const char* name, const auto member) {
      if (const auto setting = in.find(name)) read(*setting, mode.*member);
    });
    return mode;
  }

  static double time(const JsonReader& in) {
    const double us = in.number();
    if (us < 0) in.fail_expected("a time in us that is not negative");
    return us;
  }

  static Cost cost(const JsonReader& in) {
    Cost cost;
    cost.forward_us = time(in.at("forward_us"));
    cost.backward_us = time(in.at("backward_us"));
    cost.output_bytes = in.at("output_bytes").integer(0);
    cost.saved_bytes = in.at("saved_bytes").integer(0);
    return cost;
  }

  void add_operator(const JsonReader& in) {
    const int64_t last_schema = static_cast<int64_t>(schemas_.size()) - 1;
    Operator op(schemas_[in.at("schema").integer(0, last_schema)]);
    const JsonReader arguments = in.at("arguments");
    for (const JsonReader& a : arguments.elements()) op.arguments.push_back(argument(a));
    const size_t expected = op.handle.schema().arguments().size();
    if (op.arguments.size() != expected) {
      arguments.fail(c10::str("operator ", op.name(), " has ", expected,
                              " arguments in this version of libtorch, got ", op.arguments.size()),
                     kSaveAgain);
    }
    op.scope = name(in.at("scope"));
    op.results = integers<decltype(op.results)>(in.at("results"), kUndefined, value_count_ - 1);
    op.result_is_argument =
        integers<decltype(op.result_is_argument)>(in.at("result_is_argument"), -1, kMaxCount);
    op.list_lengths = integers<decltype(op.list_lengths)>(in.at("list_lengths"), -1, kMaxCount);
    op.writes = integers<decltype(op.writes)>(in.at("writes"), 0, graph_.alias_sets - 1);
    op.mode = mode(in.at("mode"));
    op.reads_parameter = in.at("reads_parameter").boolean();
    op.random_ordinal = static_cast<int>(in.at("random_ordinal").integer(-1, kMaxCount));
    op.first_result = static_cast<ValueId>(in.at("first_result").integer(0, value_count_));
    op.cost = cost(in.at("cost"));
    graph_.operators.push_back(std::move(op));
  }

  /// Values are made before they are used, by the operators that list them as results: the passes
  /// rely on it.
  void check_producers() const {
    for (size_t i = 0; i < graph_.operators.size(); ++i) {
      const int index = static_cast<int>(i);
      const JsonReader in = root_.at("operators").at(i);
      for (const Argument& argument : graph_.operators[i].arguments) {
        for (const ValueId used : argument.values) {
          if (used == kUndefined || graph_.values[used].producer < index) continue;
          in.at("arguments")
              .fail(c10::str("value ", used, " is used before it is made"), kSaveAgain);
        }
      }
      for (const ValueId made : graph_.operators[i].results) {
        if (made == kUndefined || graph_.values[made].producer == index) continue;
        in.at("results").fail(c10::str("value ", made, " names another producer"), kSaveAgain);
      }
    }
  }

  static constexpr int64_t kMaxElements = std::numeric_limits<int64_t>::max();

  JsonReader root_;
  Graph graph_;
  std::vector<c10::OperatorHandle> schemas_;
  int64_t value_count_ = 0;
  int64_t operator_count_ = 0;
};

std::map<std::string, double> optimizer_state_of(const JsonReader& root) {
  constexpr double kMostState = 1e6;  // so that no number of bytes overflows
  std::map<std::string, double> states;
  const auto saved = root.find("optimizer_state");
  for (size_t i = 0; saved && i < saved->size(); ++i) {
    const JsonReader state = saved->at(i), factor = state.at("bytes_per_byte");
    if (factor.number() < 0 || factor.number() > kMostState) {
      factor.fail_expected("a number from 0 to 1000000");
    }
    states[state.at("parameter").text()] = factor.number();
  }
  return states;
}

std::string text_of(const Graph& graph, const std::map<std::string, double>& optimizer_state) {
  std::vector<Json> schemas, values, operators, roots, states;
  std::map<std::string, int> schema_indices;
  for (const Operator& op : graph.operators) {
    check_name(op.scope);
    const auto [schema, is_new] =
        schema_indices.try_emplace(op.name(), static_cast<int>(schemas.size()));
    if (is_new) schemas.push_back(c10::str(op.handle.schema()));
    operators.push_back(to_json(op, schema->second));
  }
  for (const Value& value : graph.values) {
    check_name(value.name);
    values.push_back(to_json(value));
  }
  for (const BackwardRoot& root : graph.roots) roots.push_back(to_json(root));
  for (const auto& [name, factor] : optimizer_state) {
    check_name(name);
    states.push_back({{"parameter", name}, {"bytes_per_byte", factor}});
  }

  std::string text = c10::str("{\n\"format\": \"", kFormat, "\",\n\"version\": ", kVersion,
                              ",\n\"fingerprint\": \"", fingerprint_text(graph),
                              "\",\n\"alias_sets\": ", graph.alias_sets,
                              ",\n\"inputs\": ", array(graph.inputs).dump(),
                              ",\n\"outputs\": ", array(graph.outputs).dump());
  append_lines(text, "roots", roots);
  append_lines(text, "schemas", schemas);
  append_lines(text, "values", values);
  append_lines(text, "operators", operators);
  if (!states.empty()) append_lines(text, "optimizer_state", states);
  return text + "\n}\n";
}

}  // namespace

std::string graph_to_json(const Graph& graph,
                          const std::map<std::string, double>& optimizer_state) {
  try {
    return text_of(graph, optimizer_state);
  } catch (const nlohmann::json::exception& error) {
    core::fail<CaptureError>(
        "cannot save the graph: expected constants of text in UTF-8, got: ", error.what(),
        ". Leave out the configuration parameter \"graph_file\".");
  }
}

SavedGraph saved_graph_from_json(const std::string& text, const std::string& source_name) {
  const nlohmann::json document = core::parse_json(text, source_name);
  const JsonReader root(document, source_name);
  return {GraphReader(root).run(), optimizer_state_of(root)};
}

void save_graph(const Graph& graph, const std::string& path,
                const std::map<std::string, double>& optimizer_state) {
  core::write_file(path, graph_to_json(graph, optimizer_state), "cannot write the graph");
}

SavedGraph load_graph(const std::string& path) {
  constexpr uint64_t kMost = uint64_t{512} << 20;  // a million operators
  return saved_graph_from_json(core::read_file(path, "the saved graph", kMost), path);
}

}  // namespace smp::graph
