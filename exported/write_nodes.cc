// SPDX-License-Identifier: Apache-2.0
#include "exported/write_nodes.h"

#include <ATen/core/jit_type.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "exported/enumerations.h"
#include "exported/export_plan.h"
#include "exported/write_scope.h"
#include "exported/write_values.h"
#include "graph/content.h"
#include "graph/graph.h"
#include "graph/operator_traits.h"

namespace smp::exported {
namespace {

using c10::TypeKind;
using Json = nlohmann::json;
using ArgumentKind = graph::Argument::Kind;

constexpr int kPositional = 1;
constexpr int kByName = 2;

bool is_integer(const c10::Type& type) {
  return type.kind() == TypeKind::IntType || type.kind() == TypeKind::SymIntType;
}

template <class List, class Write>
Json list_of(const List& list, const Write& write) {
  auto json = Json::array();
  for (const auto& element : list) json.push_back(write(element));
  return json;
}

/// Null for a list that a program cannot have.
Json write_list(const c10::Type& element, const c10::IValue& value) {
  if (!value.isList()) return nullptr;
  const auto list = value.toListRef();
  if (is_integer(element)) {
    return tagged("as_ints", list_of(list, [](const c10::IValue& v) { return v.toInt(); }));
  }
  switch (element.kind()) {
    case TypeKind::FloatType:
      return tagged("as_floats",
                    list_of(list, [](const c10::IValue& v) { return write_real(v.toDouble()); }));
    case TypeKind::BoolType:
      return tagged("as_bools", list_of(list, [](const c10::IValue& v) { return v.toBool(); }));
    case TypeKind::StringType:
      return tagged("as_strings",
                    list_of(list, [](const c10::IValue& v) { return v.toStringRef(); }));
    default:
      return nullptr;
  }
}

/// The same of an argument of that type, without "optional".
Json write_argument(const c10::Type& type, const c10::IValue& value) {
  if (value.isNone()) return write_constant(value);
  switch (type.kind()) {
    case TypeKind::ScalarTypeType:
      return tagged("as_scalar_type", write_dtype(static_cast<at::ScalarType>(value.toInt())));
    case TypeKind::LayoutType: {
      const bool is_dense = static_cast<at::Layout>(value.toInt()) == at::kStrided;
      return is_dense ? tagged("as_layout", kDenseLayout) : Json(nullptr);
    }
    case TypeKind::MemoryFormatType: {
      const auto number = number_of(static_cast<at::MemoryFormat>(value.toInt()));
      return number ? tagged("as_memory_format", *number) : Json(nullptr);
    }
    case TypeKind::ListType:
      return write_list(*type.expectRef<c10::ListType>().getElementType(), value);
    default:
      break;
  }
  if (value.isDevice()) return tagged("as_device", write_device(value.toDevice()));
  if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    return tagged("as_complex", {{"real", number.real()}, {"imag", number.imag()}});
  }
  return write_constant(value);
}

/// One number stands for a list of a fixed length, `int[2] dilation=1`, and Python wants all.
c10::IValue expanded(const c10::Argument& schema, const c10::IValue& value) {
  const bool is_short = schema.N() && value.isIntList() && value.toIntVector().size() == 1;
  if (!is_short) return value;
  return std::vector<int64_t>(static_cast<size_t>(*schema.N()), value.toIntVector()[0]);
}

bool is_same(const c10::IValue& a, const c10::IValue& b) {
  return a.tagKind() == b.tagKind() && graph::constant_to_string(a) == graph::constant_to_string(b);
}

}  // namespace

Json make_node(const std::string& target, const std::string& name, Json inputs, Json outputs,
               Json metadata) {
  return {{"target", target},
          {"inputs", std::move(inputs)},
          {"outputs", std::move(outputs)},
          {"metadata", std::move(metadata)},
          {"is_hop_single_tensor_return", nullptr},
          {"name", name}};
}

Json positional(const std::string& name, Json value) {
  return {{"name", name}, {"arg", std::move(value)}, {"kind", kPositional}};
}

NodeWriter::NodeWriter(const ExportRequest& request) : request_(request) {}

/// The arguments by position up to the last argument that is not its default; those before it
/// cannot be left out.
Json NodeWriter::arguments(size_t index, WriteScope& scope) {
  const graph::Operator& op = request_.graph().operators[index];
  const auto& schema = op.handle.schema().arguments();
  const c10::IValue dtype = explicit_dtype(op);
  size_t end = 0;
  for (size_t i = 0; i < schema.size(); ++i) {
    if (!schema[i].kwarg_only() && !is_default(index, i)) end = i + 1;
  }
  auto inputs = Json::array();
  for (size_t i = 0; i < schema.size(); ++i) {
    const bool by_name = schema[i].kwarg_only();
    const bool is_dtype = schema[i].name() == "dtype" && !dtype.isNone();
    if (by_name ? is_default(index, i) && !is_dtype : i >= end) continue;
    Json value = op.arguments[i].kind != ArgumentKind::kConstant ? tensors(op.arguments[i], scope)
                 : is_dtype ? write_argument(*graph::without_optional(schema[i].real_type()), dtype)
                            : constant(index, i, scope);
    inputs.push_back({{"name", schema[i].name()},
                      {"arg", std::move(value)},
                      {"kind", by_name ? kByName : kPositional}});
    note_number(index, i);
  }
  return inputs;
}

/// The number that libtorch wrapped into the argument's tensor; none for another argument.
c10::IValue NodeWriter::wrapped_number_in(const graph::Argument& argument) const {
  if (argument.kind != ArgumentKind::kTensor || argument.values[0] == graph::kUndefined) return {};
  const at::Tensor& content = request_.graph().values[argument.values[0]].content;
  return graph::is_wrapped_number(content) ? c10::IValue(content.item()) : c10::IValue();
}

Json NodeWriter::tensors(const graph::Argument& argument, WriteScope& scope) const {
  const auto named = [&](graph::ValueId id) { return Json{{"name", scope.tensor(id)}}; };
  const auto optional = [&](graph::ValueId id) {
    return id == graph::kUndefined ? write_constant({}) : tagged("as_tensor", named(id));
  };
  switch (argument.kind) {
    case ArgumentKind::kTensorList:
      return tagged("as_tensors", list_of(argument.values, named));
    case ArgumentKind::kOptionalTensorList:
      return tagged("as_optional_tensors", list_of(argument.values, optional));
    default:
      const c10::IValue number = wrapped_number_in(argument);
      return number.isNone() ? optional(argument.values[0])
                             : write_argument(*c10::NumberType::get(), number);
  }
}

bool NodeWriter::is_default(size_t index, size_t argument) const {
  const auto& schema = request_.graph().operators[index].handle.schema().arguments()[argument];
  return schema.default_value() &&
         std::all_of(request_.graphs.begin(), request_.graphs.end(), [&](const auto& graph) {
           const graph::Argument& given = graph->operators[index].arguments[argument];
           if (given.kind == ArgumentKind::kConstant)
             return is_same(expanded(schema, given.constant), *schema.default_value());
           return given.kind == ArgumentKind::kTensor && given.values[0] == graph::kUndefined &&
                  schema.default_value()->isNone();
         });
}

/// A factory's type, and the one that it would have in Python, where the default type may be
/// another.
c10::IValue NodeWriter::explicit_dtype(const graph::Operator& op) const {
  const auto& schema = op.handle.schema();
  if (graph::has_tensor_argument(schema) || op.results.empty()) return {};
  const graph::ValueId result = op.results[0];
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    if (schema.arguments()[i].name() != "dtype" || !op.arguments[i].constant.isNone()) continue;
    return static_cast<int64_t>(request_.graph().values[result].meta.dtype);
  }
  return {};
}

Json NodeWriter::constant(size_t index, size_t argument, WriteScope& scope) const {
  const auto& schema = request_.graph().operators[index].handle.schema().arguments()[argument];
  std::vector<c10::IValue> seen;
  for (const auto& graph : request_.graphs) {
    seen.push_back(expanded(schema, graph->operators[index].arguments[argument].constant));
  }
  const auto all = [&](const auto& test) { return std::all_of(seen.begin(), seen.end(), test); };
  const std::string what = "argument \"" + schema.name() + "\"";
  if (all([&](const c10::IValue& value) { return is_same(value, seen[0]); })) {
    Json json = write_argument(*graph::without_optional(schema.real_type()), seen[0]);
    SMP_INTERNAL_ASSERT(!json.is_null(), what, " of operator ",
                        request_.graph().operators[index].name(), " has type ",
                        schema.type()->str());
    return json;
  }
  const auto symbolic = [&](const std::vector<int64_t>& numbers) {
    const SizeFormula size =
        formula(numbers, "operator " + request_.graph().operators[index].name() + " has an " +
                             what + " that");
    if (const auto constant = size.constant()) return tagged("as_int", *constant);
    return tagged("as_name", scope.number(size));
  };
  if (all([](const c10::IValue& value) { return value.isInt(); })) {
    std::vector<int64_t> numbers;
    for (const c10::IValue& value : seen) numbers.push_back(value.toInt());
    return tagged("as_sym_int", symbolic(numbers));
  }
  const bool are_lists = all([&](const c10::IValue& value) {
    return value.isIntList() && value.toIntVector().size() == seen[0].toIntVector().size();
  });
  if (!are_lists) {
    refuse(request_.file, request_.graph().operators[index],
           "has an " + what + " that differs with the dynamic sizes, and is no size: " +
               graph::constant_to_string(seen[0]) + " and " +
               graph::constant_to_string(seen.back()),
           "Compute it by tensor operators, or leave the size fixed");
  }
  auto list = Json::array();
  for (size_t k = 0; k < seen[0].toIntVector().size(); ++k) {
    std::vector<int64_t> numbers;
    for (const c10::IValue& value : seen) numbers.push_back(value.toIntVector()[k]);
    list.push_back(symbolic(numbers));
  }
  return tagged("as_sym_ints", std::move(list));
}

SizeFormula NodeWriter::formula(const std::vector<int64_t>& seen, const std::string& what) const {
  const auto found = request_.grid.fit(seen);
  if (!found) {
    const size_t last = seen.size() - 1;
    core::fail<CaptureError>("cannot export \"", request_.file, "\": ", what, " is ", seen[0],
                             " for dynamic sizes ", request_.grid.shown(0), " and ", seen[last],
                             " for ", request_.grid.shown(last),
                             ", which is no sum of products of them. Leave one of the sizes fixed, "
                             "or write that part of "
                             "the model without dividing sizes");
  }
  return *found;
}

Json NodeWriter::meta(graph::ValueId value) const {
  const graph::TensorMeta& given = request_.graph().values[value].meta;
  std::vector<int64_t> inputs;
  if (!request_.sizes.empty()) inputs = request_.grid.sizes(0);
  const auto written = [&](size_t axis, const auto& numbers_of) {
    std::vector<int64_t> seen;
    for (const auto& graph : request_.graphs) {
      seen.push_back(numbers_of(graph->values[value].meta)[axis]);
    }
    return write_size(formula(seen, "a tensor's size or stride"), inputs);
  };
  WrittenMeta meta{given.dtype, given.device, given.requires_grad, {}, {}};
  for (size_t axis = 0; axis < given.sizes.size(); ++axis) {
    meta.sizes.push_back(written(
        axis, [](const auto& m) -> const auto& { return m.sizes; }));
    meta.strides.push_back(written(
        axis, [](const auto& m) -> const auto& { return m.strides; }));
  }
  return write_meta(meta);
}

/// The modules around it, outermost first: "key,path,type;key,path,type".
Json NodeWriter::metadata(const std::string& scope) const {
  std::string stack;
  for (const auto& [path, type] : request_.modules) {
    const bool is_around = path.empty() || path == scope || scope.rfind(path + ".", 0) == 0;
    if (!is_around) continue;
    std::string key = "L__self___" + path;
    std::replace(key.begin(), key.end(), '.', '_');
    stack += (stack.empty() ? "" : ";") + key + "," + python_path(path) + "," + type;
  }
  if (stack.empty()) return Json::object();
  return {{"nn_module_stack", stack}};
}

void NodeWriter::note_number(size_t index, size_t argument) {
  const graph::Operator& op = request_.graph().operators[index];
  const graph::Argument& given = op.arguments[argument];
  c10::IValue number = wrapped_number_in(given);
  if (graph::is_patchable(op.handle.schema(), argument) && !is_default(index, argument)) {
    number = given.constant;
  }
  if (number.isNone()) return;
  numbers_.push_back((op.scope.empty() ? "" : op.scope + ": ") + op.name() + "(" +
                     op.handle.schema().arguments()[argument].name() + "=" +
                     (number.isDouble() ? write_real(number.toDouble()).dump()
                                        : graph::constant_to_string(number)) +
                     ")");
}

}  // namespace smp::exported
