// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/text.h"
#include "exported/action.h"

namespace smp::exported {
namespace {

struct Type {
  const char* name;
  bool (c10::IValue::*is_of)() const;
  c10::IValue example;
};

const Type& type_of(ValueType type) {
  static const std::array<Type, 4> types = {{{"tensor", &c10::IValue::isTensor, at::Tensor()},
                                             {"integer", &c10::IValue::isInt, 0},
                                             {"real number", &c10::IValue::isDouble, 0.0},
                                             {"boolean", &c10::IValue::isBool, false}}};
  return types.at(static_cast<size_t>(type));
}

std::string described(const Node& node) {
  std::string text =
      "node \"" + core::printable(node.name, 60) + "\" (" + core::printable(node.target, 100);
  if (!node.module.empty()) text += ", in module \"" + core::printable(node.module, 100) + "\"";
  return text + ")";
}

void put(Frame& frame, const Node& node, Slot slot, c10::IValue value) {
  if (slot == kNoSlot) return;
  const Value& expected = frame.function.values[slot];
  if (!is_of(value, expected.type)) {
    core::fail<CheckpointError>(
        "exported program \"", core::printable(frame.environment.file), "\": ", described(node),
        " returned a value of type ", value.tagKind(), " where the program has ",
        to_string(expected.type), " \"", core::printable(expected.name, 60),
        "\". The program does not fit this libtorch: export it again by the torch that you link");
  }
  frame.values[slot] = std::move(value);
}

void put_results(Frame& frame, const Node& node, std::vector<c10::IValue> results) {
  bool fits = results.size() == node.results.size();
  for (size_t i = 0; fits && i < results.size(); ++i) {
    const Result& result = node.results[i];
    if (!result.is_list) {
      put(frame, node, result.slots.front(), std::move(results[i]));
      continue;
    }
    fits = results[i].isList() && results[i].toListRef().size() == result.slots.size();
    for (size_t k = 0; fits && k < result.slots.size(); ++k) {
      put(frame, node, result.slots[k], results[i].toListRef()[k]);
    }
  }
  SMP_CHECK_WITH(CheckpointError, fits, "exported program \"",
                 core::printable(frame.environment.file), "\": ", described(node),
                 " returned another number of values than the program "
                 "has. Export it again by the torch that you link");
}

/// libtorch's own errors, of shapes and types that do not fit, do not say where.
std::vector<c10::IValue> run_node(Frame& frame, const Node& node) {
  try {
    return node.action(frame);
  } catch (const Error&) {
    throw;
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    core::fail<Error>("exported program \"", core::printable(frame.environment.file),
                      "\": ", described(node), ": ", core::text_without_prefix(error));
  }
}

}  // namespace

const char* to_string(ValueType type) { return type_of(type).name; }
bool is_of(const c10::IValue& value, ValueType type) { return (value.*type_of(type).is_of)(); }
const c10::IValue& example_of(ValueType type) { return type_of(type).example; }

void refuse(const std::string& file, const Node& node, const std::string& what,
            const std::string& remedy) {
  core::fail<CheckpointError>("exported program \"", file, "\": ", described(node), " ", what, ". ",
                              remedy);
}

c10::IValue value_of(const Argument& argument, const Frame& frame) {
  switch (argument.kind) {
    case Argument::Kind::kConstant:
      return argument.constant;
    case Argument::Kind::kSlot:
      return frame.values[argument.slot];
    case Argument::Kind::kDevice:
      return frame.environment.device;
    case Argument::Kind::kList: {
      c10::impl::GenericList list(c10::AnyType::get());
      for (const Argument& element : argument.elements) list.push_back(value_of(element, frame));
      return list;
    }
    case Argument::Kind::kFunction:
      break;
  }
  SMP_INTERNAL_ASSERT(false, "a function is no value");
}

void bind_actions(const std::string& file, Function& function) {
  for (Node& node : function.nodes) {
    for (NamedArgument& argument : node.arguments) {
      if (argument.value.kind != Argument::Kind::kFunction) continue;
      auto body = std::make_shared<Function>(*argument.value.function);
      bind_actions(file, *body);
      argument.value.function = std::move(body);
    }
    for (const auto find : {number_action, region_action, operator_action}) {
      if (node.action == nullptr) node.action = find(file, node, function);
    }
    if (node.action == nullptr) {
      refuse(file, node, "calls what this version cannot load",
             "Only operators of libtorch's dispatcher, and arithmetic on sizes, can be "
             "called: rewrite that part of the model in Python");
    }
  }
}

std::vector<c10::IValue> run_function(const Function& function, std::vector<c10::IValue> inputs,
                                      const Environment& environment) {
  Frame frame{function, environment, std::vector<c10::IValue>(function.values.size())};
  SMP_INTERNAL_ASSERT(inputs.size() == function.inputs.size(), "inputs of a function");
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (function.inputs[i] != kNoSlot) frame.values[function.inputs[i]] = std::move(inputs[i]);
  }
  inputs.clear();
  graph::RunningModule module = environment.root;
  for (const Node& node : function.nodes) {
    module.path = node.module;
    const graph::ModuleScope scope(module);
    put_results(frame, node, run_node(frame, node));
    for (Slot slot : node.last_uses) frame.values[slot] = {};
  }
  std::vector<c10::IValue> results;
  for (const Argument& output : function.outputs) results.push_back(value_of(output, frame));
  return results;
}

}  // namespace smp::exported
