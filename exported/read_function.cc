// SPDX-License-Identifier: Apache-2.0
#include "exported/read_function.h"

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/text.h"
#include "exported/enumerations.h"
#include "exported/program_json.h"

namespace smp::exported {
namespace {

using Kind = Argument::Kind;

Argument constant(c10::IValue value) {
  Argument argument;
  argument.constant = std::move(value);
  return argument;
}

Argument list(std::vector<Argument> elements) {
  Argument argument;
  argument.kind = Kind::kList;
  argument.elements = std::move(elements);
  return argument;
}

/// The path of the innermost module in `nn_module_stack`: "key,path,type;key,path,type". Entries
/// that are no modules have three equal parts.
std::string module_of(const std::string& stack) {
  const size_t begin = stack.rfind(';') == std::string::npos ? 0 : stack.rfind(';') + 1;
  const size_t first = stack.find(',', begin);
  if (first == std::string::npos) return "";
  const size_t second = stack.find(',', first + 1);
  const std::string path = stack.substr(first + 1, second - first - 1);
  return path == stack.substr(begin, first - begin) ? "" : path;
}

/// Reads one function. Names are those of values before the place that is read.
class Reading {
 public:
  Reading(std::optional<at::Device>& device, std::string name) : device_(device) {
    function_.name = std::move(name);
  }

  Function read(const core::JsonReader& graph) {
    for (const core::JsonReader& input : graph.at("inputs").elements()) add_input(input);
    const core::JsonReader nodes = graph.at("nodes");
    function_.nodes.reserve(nodes.size());
    for (const core::JsonReader& node : nodes.elements()) add_node(node);
    for (const core::JsonReader& output : graph.at("outputs").elements()) {
      function_.outputs.push_back(argument(output));
    }
    find_last_uses();
    return std::move(function_);
  }

  Argument argument(const core::JsonReader& place) {
    const auto [tag, value] = tagged(place);
    const auto found = readers().find(tag);
    if (found == readers().end()) {
      core::fail<CheckpointError>("exported program \"", place.source(),
                                  "\": ", node_.empty() ? "a result" : node_,
                                  " has an argument of kind \"", core::printable(tag, 60),
                                  "\", which this version cannot load. Rewrite that part of the "
                                  "model in Python, or make it "
                                  "a part that is not exported");
    }
    return found->second(*this, value);
  }

 private:
  using Read = std::function<Argument(Reading&, const core::JsonReader&)>;

  using Readers = std::unordered_map<std::string, Read>;

  template <class Value>
  static Read constant_of(Value value) {
    return [value](Reading&, const core::JsonReader& p) { return constant(value(p)); };
  }
  template <class Number>
  static Read number_of(Number number) {
    return constant_of([=](const core::JsonReader& p) { return static_cast<int64_t>(number(p)); });
  }
  static Read list_of(Read read) {
    return [read = std::move(read)](Reading& reading, const core::JsonReader& place) {
      std::vector<Argument> arguments;
      for (const core::JsonReader& element : place.elements()) {
        arguments.push_back(read(reading, element));
      }
      return list(std::move(arguments));
    };
  }

  /// The kinds of which there are lists, too.
  static Readers listed() {
    const auto symbolic = [](Reading& r, const core::JsonReader& p) { return r.symbolic(p); };
    return {
        {"as_tensor", [](Reading& r, const core::JsonReader& p) { return r.value(p.at("name")); }},
        {"as_optional_tensor", [](Reading& r, const core::JsonReader& p) { return r.argument(p); }},
        {"as_int", constant_of([](const core::JsonReader& p) { return p.integer(); })},
        {"as_float", constant_of(real_of)},
        {"as_bool", constant_of([](const core::JsonReader& p) { return p.boolean(); })},
        {"as_string", constant_of([](const core::JsonReader& p) { return p.text(); })},
        {"as_sym_int", symbolic},
        {"as_sym_float", symbolic},
        {"as_sym_bool", symbolic}};
  }

  static const Readers& readers() {
    static const Readers table = [] {
      Readers readers = {
          {"as_none", constant_of([](const core::JsonReader&) { return c10::IValue(); })},
          {"as_complex", constant_of([](const core::JsonReader& p) {
             return c10::complex<double>(real_of(p.at("real")), real_of(p.at("imag")));
           })},
          {"as_scalar_type", number_of(read_dtype)},
          {"as_layout", number_of(read_layout)},
          {"as_memory_format", number_of(read_memory_format)},
          {"as_device",
           [](Reading& r, const core::JsonReader& p) {
             note_device(p, r.device_);
             Argument argument;
             argument.kind = Kind::kDevice;
             return argument;
           }},
          {"as_graph", [](Reading& r, const core::JsonReader& p) {
             Argument argument;
             argument.kind = Kind::kFunction;
             argument.function = std::make_shared<const Function>(
                 read_function(p.at("graph"), p.at("name").text(), r.device_));
             return argument;
           }}};
      for (const auto& [tag, read] : listed()) {
        readers[tag] = read;
        readers[tag + "s"] = list_of(read);
      }
      return readers;
    }();
    return table;
  }

  Argument value(const core::JsonReader& name) const {
    const auto found = slots_.find(name.text());
    if (found == slots_.end()) {
      core::fail<CheckpointError>(
          "exported program \"", name.source(), "\": ", node_.empty() ? "a result" : node_,
          " reads value \"", core::printable(name.text(), 60),
          "\", which nothing before it makes. The file is damaged: write it again by "
          "torch.export.save");
    }
    Argument argument;
    argument.kind = Kind::kSlot;
    argument.slot = found->second;
    return argument;
  }

  Argument symbolic(const core::JsonReader& place) const {
    const auto [tag, value] = tagged(place);
    if (tag == "as_name") return this->value(value);
    if (tag == "as_int") return constant(value.integer());
    if (tag == "as_float") return constant(real_of(value));
    if (tag == "as_bool") return constant(value.boolean());
    place.fail_expected("the name of a value, or a number");
  }

  void add_input(const core::JsonReader& input) {
    const auto [tag, value] = tagged(input);
    if (types().count(tag) > 0) {
      function_.inputs.push_back(add_value(tag, value));
    } else {
      argument(input);  // which must be a constant
      function_.inputs.push_back(kNoSlot);
    }
  }

  /// The types of the kinds that a value may be.
  static const std::unordered_map<std::string, ValueType>& types() {
    static const std::unordered_map<std::string, ValueType> types = {
        {"as_tensor", ValueType::kTensor},
        {"as_sym_int", ValueType::kInteger},
        {"as_sym_float", ValueType::kReal},
        {"as_sym_bool", ValueType::kBoolean}};
    return types;
  }

  /// The slot of a new value.
  Slot add_value(const std::string& tag, const core::JsonReader& place) {
    const ValueType type = types().at(tag);
    const std::string name = place.at(type == ValueType::kTensor ? "name" : "as_name").text();
    const Slot slot = static_cast<Slot>(function_.values.size());
    if (!slots_.emplace(name, slot).second) {
      core::fail<CheckpointError>("exported program \"", place.source(), "\": value \"",
                                  core::printable(name, 60),
                                  "\" is made twice. The file is damaged: write it again by "
                                  "torch.export.save");
    }
    function_.values.push_back({name, type});
    return slot;
  }

  Result result(const core::JsonReader& place) {
    const auto [tag, value] = tagged(place);
    if (tag == "as_none") return {false, {kNoSlot}};
    if (tag == "as_optional_tensor") return result(value);
    if (tag == "as_tensors" || tag == "as_optional_tensors") {
      Result list{true, {}};
      for (const core::JsonReader& element : value.elements()) {
        if (tag == "as_tensors") {
          list.slots.push_back(add_value("as_tensor", element));
        } else {
          const Result one = result(element);
          if (one.is_list) element.fail_expected("a tensor or nothing");
          list.slots.push_back(one.slots.front());
        }
      }
      return list;
    }
    if (types().count(tag) == 0) {
      place.fail_expected("a tensor, tensors, a number or nothing");
    }
    return {false, {add_value(tag, value)}};
  }

  void add_node(const core::JsonReader& place) {
    Node node;
    node.target = place.at("target").text();
    node.name = place.has("name") ? place.at("name").text() : "";
    node_ = "node \"" + core::printable(node.name.empty() ? node.target : node.name, 60) + "\"";
    if (place.has("metadata") && place.at("metadata").has("nn_module_stack")) {
      node.module = module_of(place.at("metadata").at("nn_module_stack").text());
    }
    for (const core::JsonReader& input : place.at("inputs").elements()) {
      node.arguments.push_back({input.at("name").text(), argument(input.at("arg"))});
    }
    for (const core::JsonReader& output : place.at("outputs").elements()) {
      node.results.push_back(result(output));
    }
    function_.nodes.push_back(std::move(node));
    node_.clear();
  }

  static void note_uses(const Argument& argument, const std::function<void(Slot)>& note) {
    if (argument.kind == Kind::kSlot) note(argument.slot);
    for (const Argument& element : argument.elements) note_uses(element, note);
  }

  /// Values are let go where they are read for the last time, or made and never read.
  void find_last_uses() {
    std::vector<bool> is_used(function_.values.size(), false);
    for (const Argument& output : function_.outputs) {
      note_uses(output, [&](Slot slot) { is_used[slot] = true; });
    }
    for (auto node = function_.nodes.rbegin(); node != function_.nodes.rend(); ++node) {
      const auto note = [&](Slot slot) {
        if (slot == kNoSlot || is_used[slot]) return;
        is_used[slot] = true;
        node->last_uses.push_back(slot);
      };
      for (const Result& result : node->results) {
        for (Slot slot : result.slots) note(slot);
      }
      for (const NamedArgument& input : node->arguments) note_uses(input.value, note);
    }
  }

  std::optional<at::Device>& device_;
  Function function_;
  std::unordered_map<std::string, Slot> slots_;
  std::string node_;  // that is being read, as errors call it
};

}  // namespace

Function read_function(const core::JsonReader& graph, const std::string& name,
                       std::optional<at::Device>& device) {
  return Reading(device, name).read(graph);
}

Argument read_constant(const core::JsonReader& argument, std::optional<at::Device>& device) {
  return Reading(device, "").argument(argument);
}

void note_device(const core::JsonReader& place, std::optional<at::Device>& device) {
  const at::Device named = read_device(place);
  if (!device) device = named;
  SMP_CHECK_WITH(CheckpointError, *device == named, "exported program \"", place.source(),
                 "\" uses several devices, ", device->str(), " and ", named.str(),
                 ". A loaded program runs on one, that of its rank: export the model with all its "
                 "tensors on one device");
}

}  // namespace smp::exported
