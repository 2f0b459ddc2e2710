// SPDX-License-Identifier: Apache-2.0
#include "exported/write_signature.h"

#include <limits>
#include <utility>

#include "exported/structure.h"
#include "exported/write_values.h"

namespace smp::exported {
namespace {

using Json = nlohmann::json;
using Kind = Input::Kind;

Json input_spec(const WrittenInput& input) {
  const Json name = {{"name", input.name}};
  switch (input.kind) {
    case Kind::kParameter:
      return tagged("parameter", {{"arg", name}, {"parameter_name", input.target}});
    case Kind::kBuffer:
      return tagged("buffer", {{"arg", name}, {"buffer_name", input.target}, {"persistent", true}});
    case Kind::kConstant:
      return tagged("tensor_constant", {{"arg", name}, {"tensor_constant_name", input.target}});
    case Kind::kUser:
      break;
  }
  if (!input.meta.is_null()) return tagged("user_input", {{"arg", tagged("as_tensor", name)}});
  return tagged("constant_input", {{"name", input.name}, {"value", write_constant(input.fixed)}});
}

}  // namespace

Json write_signature(const std::vector<WrittenInput>& inputs, const std::vector<Json>& outputs) {
  auto input_specs = Json::array(), output_specs = Json::array();
  for (const WrittenInput& input : inputs) input_specs.push_back(input_spec(input));
  for (const Json& output : outputs) {
    output_specs.push_back(tagged("user_output", {{"arg", output}}));
  }
  return {{"input_specs", std::move(input_specs)}, {"output_specs", std::move(output_specs)}};
}

Json write_calls(const ExportRequest& request) {
  std::vector<c10::IValue> leaves;
  Structure positions{Structure::Kind::kTuple, {}, {}};
  for (const c10::IValue& argument : request.arguments) {
    positions.children.push_back(structure_of(argument, leaves));
  }
  const Structure by_name{Structure::Kind::kDictionary, {}, {}};
  const Structure arguments{Structure::Kind::kTuple, {positions, by_name}, {}};
  auto calls = Json::array();
  for (const auto& module : request.modules) {
    calls.push_back({{"fqn", python_path(module.first)}, {"signature", nullptr}});
    if (!module.first.empty()) continue;
    calls.back()["signature"] = {
        {"inputs", Json::array()},
        {"outputs", Json::array()},
        {"in_spec", write_structure(arguments)},
        {"out_spec", write_structure(structure_of(request.result, leaves))},
        {"forward_arg_names", request.argument_names}};
  }
  return calls;
}

Json write_ranges(const ExportRequest& request) {
  Json ranges = Json::object();
  for (size_t i = 0; i < request.sizes.size(); ++i) {
    const auto& [given, least, most] = request.sizes[i];
    Json range = {{"min_val", least}, {"max_val", nullptr}};
    if (most != std::numeric_limits<int64_t>::max()) range["max_val"] = most;
    ranges[symbol_name(i)] = std::move(range);
  }
  return ranges;
}

}  // namespace smp::exported
