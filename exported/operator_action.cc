// SPDX-License-Identifier: Apache-2.0
// Nodes that call an operator of libtorch's dispatcher, whose schema describes its arguments.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <c10/core/Scalar.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/text.h"
#include "exported/action.h"
#include "graph/content.h"
#include "graph/operator_traits.h"

namespace smp::exported {
namespace {

using ArgumentKind = Argument::Kind;
using c10::TypeKind;

const std::string kPrefix = "torch.ops.";

/// Operators that reach beyond the tensors that they are given: files, and memory by its address or
/// size, also by sizes that the operator does not check. No program needs them.
bool reaches_outside(const std::string& name) {
  static const std::set<std::string> refused = {"aten::from_file",
                                                "aten::from_blob",
                                                "aten::set_",
                                                "aten::set",
                                                "aten::resize_",
                                                "aten::resize",
                                                "aten::resize_as_",
                                                "aten::_resize_output_",
                                                "aten::set_data",
                                                "aten::record_stream",
                                                "aten::_reshape_alias",
                                                "aten::_nested_view_from_buffer",
                                                "aten::_nested_view_from_buffer_copy",
                                                "aten::_sparse_coo_tensor_unsafe",
                                                "aten::_sparse_compressed_tensor_unsafe",
                                                "aten::_sparse_csr_tensor_unsafe",
                                                "aten::_sparse_csc_tensor_unsafe",
                                                "aten::_sparse_bsr_tensor_unsafe",
                                                "aten::_sparse_bsc_tensor_unsafe",
                                                "aten::_sparse_coo_tensor_with_dims_and_tensors",
                                                "aten::_coalesced_"};
  return refused.count(name) > 0 || name.compare(0, 10, "inductor::") == 0;
}

/// How many values the enumeration has that an argument is of; 0 if it is of none. Operators take
/// such a number without a check.
int64_t values_of_enumeration(const c10::Argument& argument) {
  switch (graph::without_optional(argument.real_type())->kind()) {
    case TypeKind::ScalarTypeType:
      return static_cast<int64_t>(at::ScalarType::NumOptions);
    case TypeKind::LayoutType:
      return static_cast<int64_t>(at::Layout::NumOptions);
    case TypeKind::MemoryFormatType:
      return static_cast<int64_t>(at::MemoryFormat::NumOptions);
    default:
      return 0;
  }
}

/// "torch.ops.aten.add.Tensor": "aten::add" and "Tensor", which is empty for "default".
std::optional<c10::OperatorName> name_of(const std::string& target) {
  if (target.compare(0, kPrefix.size(), kPrefix) != 0) return std::nullopt;
  const std::string rest = target.substr(kPrefix.size());
  const size_t first = rest.find('.');
  const size_t last = rest.rfind('.');
  if (first == std::string::npos || last == first) return std::nullopt;
  const std::string overload = rest.substr(last + 1);
  return c10::OperatorName(rest.substr(0, first) + "::" + rest.substr(first + 1, last - first - 1),
                           overload == "default" ? "" : overload);
}

bool is_number(const c10::IValue& value) {
  return value.isInt() || value.isDouble() || value.isBool() || value.isComplexDouble();
}

/// Casts a value for an argument of that type; nothing where it takes no such value.
std::optional<c10::IValue> cast(c10::IValue value, TypeKind kind) {
  switch (kind) {
    case TypeKind::TensorType:
      if (value.isTensor()) return value;
      if (is_number(value)) return graph::wrapped_number(value.toScalar());  // Python does the same
      return std::nullopt;
    case TypeKind::IntType:
    case TypeKind::SymIntType:
      if (value.isBool()) return static_cast<int64_t>(value.toBool());
      return value.isInt() ? std::optional(value) : std::nullopt;
    case TypeKind::FloatType:
    case TypeKind::SymFloatType:
      if (value.isInt()) return static_cast<double>(value.toInt());
      return value.isDouble() ? std::optional(value) : std::nullopt;
    case TypeKind::BoolType:
    case TypeKind::SymBoolType:
      if (value.isInt()) return value.toInt() != 0;
      return value.isBool() ? std::optional(value) : std::nullopt;
    case TypeKind::NumberType:
      return is_number(value) ? std::optional(value) : std::nullopt;
    case TypeKind::ComplexType:
      return value.isComplexDouble() ? std::optional(value) : std::nullopt;
    case TypeKind::StringType:
      return value.isString() ? std::optional(value) : std::nullopt;
    case TypeKind::DeviceObjType:
      return value.isDevice() ? std::optional(value) : std::nullopt;
    default:
      return std::nullopt;
  }
}

/// An argument of an operator's schema, and where its value comes from.
struct Operand {
  c10::TypePtr element;  ///< its type; of a list, that of the elements; without "optional"
  bool is_list = false;
  bool may_be_none = false;  ///< it, or the elements of a list
  Argument source;
  std::optional<c10::IValue> fixed;  ///< the same in each call
};

std::optional<c10::IValue> cast_or_none(const c10::IValue& value, const Operand& operand) {
  if (value.isNone()) return operand.may_be_none ? std::optional(value) : std::nullopt;
  return cast(value, operand.element->kind());
}

std::optional<c10::IValue> operand_value(const Operand& operand, const Frame& frame) {
  if (operand.fixed) return operand.fixed;
  if (!operand.is_list) return cast_or_none(exported::value_of(operand.source, frame), operand);
  const c10::TypePtr type =
      operand.may_be_none ? c10::OptionalType::get(operand.element) : operand.element;
  c10::impl::GenericList list(type);
  for (const Argument& element : operand.source.elements) {
    const auto value = cast_or_none(exported::value_of(element, frame), operand);
    if (!value) return std::nullopt;
    list.push_back(*value);
  }
  return list;
}

/// Values that no run changes. A number that stands for a tensor is made anew in each.
bool is_fixed(const Argument& argument, const Operand& operand) {
  const bool is_tensor = operand.element->kind() == TypeKind::TensorType;
  if (argument.kind == ArgumentKind::kConstant) return !is_tensor || argument.constant.isNone();
  return argument.kind == ArgumentKind::kList &&
         std::all_of(argument.elements.begin(), argument.elements.end(),
                     [&](const Argument& element) { return is_fixed(element, operand); });
}

/// Binds a node's arguments to those of a schema.
class Binding {
 public:
  Binding(const std::string& file, const Node& node, const Function& function,
          const c10::FunctionSchema& schema)
      : file_(file), node_(node), function_(function), schema_(schema) {}

  std::vector<Operand> operands() {
    const auto& arguments = schema_.arguments();
    std::vector<const Argument*> given(arguments.size(), nullptr);
    for (size_t i = 0; i < node_.arguments.size(); ++i) {
      const size_t place = place_of(node_.arguments[i].name, i);
      if (given[place] != nullptr)
        refuse("is given argument \"" + arguments[place].name() + "\" twice");
      given[place] = &node_.arguments[i].value;
    }
    std::vector<Operand> operands;
    for (size_t i = 0; i < arguments.size(); ++i) {
      operands.push_back(operand(arguments[i], given[i]));
    }
    return operands;
  }

 private:
  size_t place_of(const std::string& name, size_t position) const {
    const auto& arguments = schema_.arguments();
    if (name.empty() && position < arguments.size()) return position;
    const auto found =
        std::find_if(arguments.begin(), arguments.end(),
                     [&](const c10::Argument& argument) { return argument.name() == name; });
    if (found == arguments.end()) {
      refuse("has an argument \"" + core::printable(name, 60) + "\", which the operator lacks");
    }
    return static_cast<size_t>(found - arguments.begin());
  }

  Operand operand(const c10::Argument& argument, const Argument* given) const {
    Operand operand = typed(argument.type());
    if (given == nullptr) {
      if (!argument.default_value()) refuse("lacks argument \"" + argument.name() + "\"");
      operand.fixed = *argument.default_value();
      return operand;
    }
    operand.source = *given;
    const bool is_none = given->kind == ArgumentKind::kConstant && given->constant.isNone();
    if (is_none && argument.type()->kind() == TypeKind::OptionalType) {
      operand.fixed = c10::IValue();
      return operand;
    }
    if (const int64_t values = values_of_enumeration(argument)) check_enumeration(*given, values);
    if (operand.is_list && operand.source.kind != ArgumentKind::kList)
      expand(argument, operand.source);
    if (!takes(operand, operand.source, operand.is_list)) {
      refuse("has an argument \"" + argument.name() + "\" that is no " + argument.type()->str());
    }
    if (is_fixed(operand.source, operand)) {
      operand.fixed = operand_value(operand, Frame{function_, Environment(), {}});
    }
    return operand;
  }

  void check_enumeration(const Argument& given, int64_t values) const {
    const bool is_number = given.kind == ArgumentKind::kConstant && given.constant.isInt();
    if (!is_number || given.constant.toInt() < 0 || given.constant.toInt() >= values) {
      refuse("has a dtype, layout or memory format that there is not");
    }
  }

  static Operand typed(c10::TypePtr type) {
    Operand operand;
    operand.element = graph::without_optional(type);
    operand.is_list = operand.element->kind() == TypeKind::ListType;
    if (operand.is_list) type = operand.element->castRaw<c10::ListType>()->getElementType();
    operand.may_be_none = type->kind() == TypeKind::OptionalType;
    operand.element = graph::without_optional(type);
    return operand;
  }

  /// One number for a list of a fixed length: `int[2] stride=1`.
  void expand(const c10::Argument& argument, Argument& source) const {
    Argument list;
    list.kind = ArgumentKind::kList;
    list.elements.assign(static_cast<size_t>(argument.N().value_or(1)), source);
    source = std::move(list);
  }

  bool takes(const Operand& operand, const Argument& argument, bool list) const {
    switch (argument.kind) {
      case ArgumentKind::kList:
        return list && std::all_of(argument.elements.begin(), argument.elements.end(),
                                   [&](const Argument& element) {
                                     return takes(operand, element, /*list=*/false);
                                   });
      case ArgumentKind::kFunction:
        return false;
      case ArgumentKind::kDevice:
        return operand.element->kind() == TypeKind::DeviceObjType;
      case ArgumentKind::kConstant:
        return !list && cast_or_none(argument.constant, operand).has_value();
      case ArgumentKind::kSlot:
        return !list &&
               cast(example_of(function_.values[argument.slot].type), operand.element->kind())
                   .has_value();
    }
    return false;
  }

  [[noreturn]] void refuse(const std::string& what) const {
    exported::refuse(
        file_, node_, what,
        "The program does not fit this libtorch: export it again by the torch that you "
        "link");
  }

  const std::string& file_;
  const Node& node_;
  const Function& function_;
  const c10::FunctionSchema& schema_;
};

}  // namespace

Action operator_action(const std::string& file, const Node& node, const Function& function) {
  const auto name = name_of(node.target);
  if (!name) return nullptr;
  if (reaches_outside(name->name)) {
    refuse(file, node, "reaches files or memory outside of its tensors, which is refused",
           "Rewrite that part of the model with ordinary operators");
  }
  const auto op = c10::Dispatcher::singleton().findSchema(*name);
  if (!op) {
    refuse(file, node, "calls an operator that is not registered in this process",
           "Link the library that registers it (TORCH_LIBRARY), or export the model again by "
           "the torch that you link");
  }
  if (node.results.size() != op->schema().returns().size()) {
    refuse(file, node, "has another number of results than its operator",
           "Export it again by the torch that you link");
  }
  auto operands = Binding(file, node, function, op->schema()).operands();
  return [op = *op, operands = std::move(operands)](const Frame& frame) {
    torch::jit::Stack stack;
    stack.reserve(operands.size());
    for (const Operand& operand : operands) {
      auto value = operand_value(operand, frame);
      SMP_INTERNAL_ASSERT(value.has_value(), "argument ", stack.size() + 1, " of ",
                          op.operator_name());
      stack.push_back(*std::move(value));
    }
    op.callBoxed(stack);
    return stack;
  };
}

}  // namespace smp::exported
