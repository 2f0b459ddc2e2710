// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "core/check.h"
#include "core/text.h"
#include "exported/enumerations.h"
#include "exported/program_json.h"
#include "exported/read_function.h"

namespace smp::exported {
namespace {

void check_versions(const core::JsonReader& json) {
  const int64_t major = json.at("schema_version").at("major").integer();
  SMP_CHECK_WITH(CheckpointError, major == kSchemaMajor, "exported program \"", json.source(),
                 "\" has schema version ", major, ", and this version of smp reads version ",
                 kSchemaMajor,
                 ", which torch 2.9 and later write. Export the model again by one "
                 "of them");
  const int64_t opset = json.at("opset_version").at("aten").integer();
  SMP_CHECK_WITH(CheckpointError, opset == kOpset, "exported program \"", json.source(),
                 "\" uses version ", opset,
                 " of the operators, and this version of smp knows "
                 "version ",
                 kOpset, ". Export the model again by the torch that you link");
}

LinearSize read_size(const core::JsonReader& place) {
  const auto [tag, value] = tagged(place);
  if (tag == "as_int") return {value.integer(), {}};
  if (tag != "as_expr") place.fail_expected("a number or an expression");
  const std::string text = value.at("expr_str").text();
  const auto size = parse_linear_size(text);
  SMP_CHECK_WITH(CheckpointError, size.has_value(), "exported program \"", place.source(),
                 "\": an input has size \"", core::printable(text, 100),
                 "\", which is no sum of multiples of dynamic sizes. Declare the sizes of inputs "
                 "in dynamic_shapes as Dim(...), or as multiples of one");
  return *size;
}

/// The value with which a program was exported; no other may be given.
c10::IValue read_fixed(const core::JsonReader& place, std::optional<at::Device>& device) {
  const Argument argument = read_constant(place, device);
  if (argument.kind != Argument::Kind::kConstant) {
    place.fail_expected("a number, a string or nothing, as the other inputs of users are");
  }
  return argument.constant;
}

/// Reads the user's input for `slot`.
Input user_input(const core::JsonReader& argument, const core::JsonReader& graph,
                 const Function& function, Slot slot, std::optional<at::Device>& device) {
  Input input;
  if (slot == kNoSlot) {
    input.fixed = read_fixed(argument, device);
    return input;
  }
  const Value& own = function.values[slot];
  const auto [tag, value] = tagged(argument);
  const bool is_tensor = own.type == ValueType::kTensor;
  if ((tag == "as_tensor") != is_tensor ||
      value.at(is_tensor ? "name" : "as_name").text() != own.name) {
    argument.fail_expected("the graph's input of that place");
  }
  input.name = own.name;
  input.type = own.type;
  if (own.type == ValueType::kInteger) {
    input.sizes = {read_size(graph.at("sym_int_values").at(input.name))};
  }
  if (!is_tensor) return input;
  const core::JsonReader meta = graph.at("tensor_values").at(input.name);
  input.dtype = read_dtype(meta.at("dtype"));
  read_layout(meta.at("layout"));
  for (const core::JsonReader& size : meta.at("sizes").elements()) {
    input.sizes.push_back(read_size(size));
    const LinearSize& read = input.sizes.back();
    if (read.terms.empty() && read.constant < 0) size.fail_expected("a size that is not negative");
  }
  return input;
}

Input read_input(const core::JsonReader& place, const core::JsonReader& graph,
                 const Function& function, Slot slot, std::optional<at::Device>& device) {
  const auto [tag, spec] = tagged(place);
  if (tag == "user_input") return user_input(spec.at("arg"), graph, function, slot, device);
  Input input;
  if (tag == "parameter") {
    input.kind = Input::Kind::kParameter;
    input.name = spec.at("parameter_name").text();
  } else if (tag == "buffer") {
    input.kind = Input::Kind::kBuffer;
    input.name = spec.at("buffer_name").text();
  } else if (tag == "tensor_constant") {
    input.kind = Input::Kind::kConstant;
    input.name = spec.at("tensor_constant_name").text();
  } else if (tag == "constant_input") {
    input.name = spec.at("name").text();
    input.fixed = read_fixed(spec.at("value"), device);
  } else {
    core::fail<CheckpointError>("exported program \"", place.source(), "\" has an input of kind \"",
                                core::printable(tag, 60),
                                "\" (custom objects, and tokens of operators with side effects, "
                                "cannot be loaded). Export the part of the model without it");
  }
  return input;
}

Output read_output(const core::JsonReader& place) {
  const auto [tag, spec] = tagged(place);
  if (tag == "user_output") return {};
  if (tag == "buffer_mutation") return {Output::Kind::kBuffer, spec.at("buffer_name").text()};
  if (tag == "user_input_mutation") {
    return {Output::Kind::kInput, spec.at("user_input_name").text()};
  }
  core::fail<CheckpointError>("exported program \"", place.source(), "\" has a result of kind \"",
                              core::printable(tag, 60),
                              "\": it is no program of a forward pass that only writes buffers and "
                              "inputs. Export the model by torch.export.export");
}

/// Where a copied result goes must be an input of that kind.
void check_outputs(const ExportedProgram& program, const core::JsonReader& signature) {
  std::set<std::pair<bool, std::string>> known;
  for (const Input& input : program.inputs) {
    const bool is_buffer = input.kind == Input::Kind::kBuffer;
    if (is_buffer || input.kind == Input::Kind::kUser) known.emplace(is_buffer, input.name);
  }
  for (size_t i = 0; i < program.outputs.size(); ++i) {
    const Output& output = program.outputs[i];
    if (output.kind == Output::Kind::kUser) continue;
    const Argument& value = program.function.outputs[i];
    const bool is_tensor = value.kind == Argument::Kind::kSlot &&
                           program.function.values[value.slot].type == ValueType::kTensor;
    if (!is_tensor || known.count({output.kind == Output::Kind::kBuffer, output.name}) == 0) {
      signature.at("output_specs")
          .fail_expected("tensors for buffers and inputs that the program has");
    }
  }
}

void note_devices(const core::JsonReader& graph, const Function& function,
                  std::optional<at::Device>& device) {
  for (Slot slot : function.inputs) {
    if (slot == kNoSlot || function.values[slot].type != ValueType::kTensor) continue;
    note_device(graph.at("tensor_values").at(function.values[slot].name).at("device"), device);
  }
}

void read_inputs(const core::JsonReader& specs, const core::JsonReader& graph,
                 ExportedProgram& program) {
  const Function& function = program.function;
  if (specs.size() != function.inputs.size())
    specs.fail_expected("one for each input of the graph");
  std::set<std::string> names;
  for (size_t i = 0; i < specs.size(); ++i) {
    const core::JsonReader place = specs.at(i);
    const Slot slot = function.inputs[i];
    Input input = read_input(place, graph, function, slot, program.device);
    const bool has_slot = slot != kNoSlot;
    const bool is_stored = input.kind != Input::Kind::kUser;
    const bool fits = is_stored ? has_slot && function.values[slot].type == ValueType::kTensor
                                : has_slot != input.fixed.has_value();
    if (!fits) place.fail_expected("tensors, numbers and constants where the graph has these");
    if (is_stored && !names.insert(input.name).second) {
      place.fail_expected("a name that no other has");
    }
    program.inputs.push_back(std::move(input));
  }
}

void read_signature(const core::JsonReader& json, ExportedProgram& program) {
  const core::JsonReader signature = json.at("signature");
  note_devices(json.at("graph"), program.function, program.device);
  read_inputs(signature.at("input_specs"), json.at("graph"), program);
  for (const core::JsonReader& spec : signature.at("output_specs").elements()) {
    program.outputs.push_back(read_output(spec));
  }
  if (program.outputs.size() != program.function.outputs.size()) {
    signature.at("output_specs").fail_expected("one for each output of the graph");
  }
  check_outputs(program, signature);
}

/// The structures of arguments and results are those of the outermost module.
void read_calls(const core::JsonReader& calls, ExportedProgram& program) {
  bool found = false;
  for (const core::JsonReader& call : calls.elements()) {
    const std::string path = call.at("fqn").text();
    if (!path.empty()) {
      program.modules.push_back(path);
      continue;
    }
    const core::JsonReader signature = call.at("signature");
    program.arguments = read_structure(signature.at("in_spec"));
    program.results = read_structure(signature.at("out_spec"));
    if (signature.has("forward_arg_names")) {
      for (const core::JsonReader& name : signature.at("forward_arg_names").elements()) {
        program.argument_names.push_back(name.text());
      }
    }
    size_t inputs = 0, outputs = 0;
    for (const Input& input : program.inputs) inputs += input.kind == Input::Kind::kUser;
    for (const Output& output : program.outputs) outputs += output.kind == Output::Kind::kUser;
    const auto& [kind, children, keys] = program.arguments;
    const bool is_call = kind == Structure::Kind::kTuple && children.size() == 2 &&
                         children[0].kind == Structure::Kind::kTuple &&
                         children[1].kind == Structure::Kind::kDictionary;
    if (!is_call || program.arguments.leaves() != inputs) {
      signature.at("in_spec").fail_expected("the program's inputs, by position and by name");
    }
    if (program.results.leaves() != outputs) {
      signature.at("out_spec").fail_expected("as many leaves as the program has results");
    }
    found = true;
  }
  if (!found) calls.fail_expected("the call of the outermost module");
}

std::map<std::string, Range> read_ranges(const core::JsonReader& constraints) {
  std::map<std::string, Range> ranges;
  for (const auto& [symbol, range] : constraints.members()) {
    using Limits = std::numeric_limits<int64_t>;
    ranges[symbol] = {range.has("min_val") ? range.at("min_val").integer() : Limits::min(),
                      range.has("max_val") ? range.at("max_val").integer() : Limits::max()};
  }
  return ranges;
}

}  // namespace

ExportedProgram read_program(const core::JsonReader& json) {
  check_versions(json);
  const core::JsonReader module = json.at("graph_module");
  ExportedProgram program;
  program.file = json.source();
  if (json.has("torch_version")) program.torch_version = json.at("torch_version").text();
  program.function = read_function(module.at("graph"), "", program.device);
  read_signature(module, program);
  read_calls(module.at("module_call_graph"), program);
  program.ranges = read_ranges(json.at("range_constraints"));
  return program;
}

}  // namespace smp::exported
